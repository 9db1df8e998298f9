// Layers with a recurrent state: token by token in one order, so that the bits of a token depend
// only on the state before it and on its own inputs.
#pragma once
#include "vmath.h"
#include "norm.h"

OCTAVO_BEGIN

constexpr int kConvTile = 128;  // channels of a task

// Calls f(slot) for both slots that receive the state after a token.
template <class F>
INLINE void for_slots(const int32_t* slots, const int32_t* snapshots, int64_t token, F f) {
  if (slots[token] >= 0) f(int64_t(slots[token]));
  if (snapshots[token] >= 0) f(int64_t(snapshots[token]));
}

// One task is a tile of channels of a request.
template <class T>
void convolve(const CausalConvArgs& a, int64_t begin_task, int64_t end_task, T) {
  alignas(64) float weight[kMaxTaps][kConvTile] = {}, window[kMaxTaps - 1][kConvTile];
  alignas(64) float flat[kMaxTaps * kConvTile];
  const int64_t past = a.taps - 1;
  int64_t loaded = -1;
  for (int64_t task = begin_task; task < end_task; task++) {
    const int64_t tile = task / a.num_reqs, r = task % a.num_reqs, first = tile * kConvTile;
    const int64_t count = min<int64_t>(kConvTile, a.channels - first);
    if (tile != loaded) {
      const T* w = static_cast<const T*>(a.weight) + first * a.taps;
      for_lanes(count * a.taps, [&](int64_t i, int n) { store(flat + i, load(w + i, n), n); });
      for (int64_t c = 0; c < count; c++)
        for (int64_t k = 0; k < a.taps; k++) weight[k][c] = flat[c * a.taps + k];
      loaded = tile;
    }
    float* inputs[kMaxTaps - 1];  // oldest first
    for (int64_t k = 0; k < past; k++) {
      inputs[k] = window[k];
      const float* from = a.state + a.sources[r] * a.state_stride + k * a.channels + first;
      for_lanes(count, [&](int64_t c, int n) {
        store(inputs[k] + c, a.sources[r] < 0 ? vf{} : load(from + c, n));
      });
    }
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
    for (int64_t token = a.query_start_loc[r]; token < a.query_start_loc[r + 1]; token++) {
      const T* x = static_cast<const T*>(a.x) + token * a.x_stride + first;
      T* out = static_cast<T*>(a.out) + token * a.out_stride + first;
      for_lanes(count, [&](int64_t c, int n) {
        vf sum = bias ? load(bias + c, n) : vf{};
        for (int64_t k = 0; k < past; k++) sum = fma(load(weight[k] + c), load(inputs[k] + c), sum);
        const vf v = load(x + c, n);
        sum = fma(load(weight[past] + c), v, sum);
        store(out + c, a.silu ? silu(sum) : sum, n);
        store(inputs[0] + c, v);
      });
      float* newest = inputs[0];
      for (int64_t k = 1; k < past; k++) inputs[k - 1] = inputs[k];
      inputs[past - 1] = newest;
      for_slots(a.slots, a.snapshots, token, [&](int64_t slot) {
        float* to = a.state + slot * a.state_stride + first;
        for (int64_t k = 0; k < past; k++, to += a.channels)
          for_lanes(count, [&](int64_t c, int n) { store(to + c, load(inputs[k] + c), n); });
      });
    }
  }
}

void causal_conv(const CausalConvArgs& a) {
  const int64_t tiles = ceil_div(a.channels, kConvTile);
  const int64_t cost = a.query_start_loc[a.num_reqs] * ceil_div(a.channels, W) * 32;
  parallel_ranges(tiles * a.num_reqs, cost, [&](int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { convolve(a, begin, end, t); });
  });
}

OCTAVO_END
