// Layers with a recurrent state: token by token in one order, so that the bits of a token depend
// only on the state before it and on its own inputs.
#pragma once
#include "norm.h"
#include "vmath.h"

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

// One task is a tile of channels of a request.
template <class T>
void shift(const TokenShiftArgs& a, int64_t begin_task, int64_t end_task, T) {
  alignas(64) float before[kConvTile];
  for (int64_t task = begin_task; task < end_task; task++) {
    const int64_t r = task % a.num_reqs, first = task / a.num_reqs * kConvTile;
    const int64_t count = min<int64_t>(kConvTile, a.channels - first);
    const float* from = a.state + a.sources[r] * a.state_stride + first;
    for_lanes(count, [&](int64_t c, int n) {
      store(before + c, a.sources[r] < 0 ? vf{} : load(from + c, n));
    });
    for (int64_t token = a.query_start_loc[r]; token < a.query_start_loc[r + 1]; token++) {
      const T* x = static_cast<const T*>(a.x) + token * a.x_stride + first;
      T* out = static_cast<T*>(a.out) + token * a.out_stride + first;
      for_lanes(count, [&](int64_t c, int n) {
        const vf v = load(x + c, n), change = load(before + c) - v;
        for (int64_t m = 0; m < a.mixes; m++)
          store(out + m * a.channels + c, fma(change, load(a.mix + m * a.channels + first + c, n), v), n);
        store(before + c, v);
      });
      for_slots(a.slots, a.snapshots, token, [&](int64_t slot) {
        float* to = a.state + slot * a.state_stride + first;
        for_lanes(count, [&](int64_t c, int n) { store(to + c, load(before + c), n); });
      });
    }
  }
}

void token_shift(const TokenShiftArgs& a) {
  const int64_t tiles = ceil_div(a.channels, kConvTile);
  const int64_t cost = a.query_start_loc[a.num_reqs] * ceil_div(a.channels, W) * (4 + 4 * a.mixes);
  parallel_ranges(tiles * a.num_reqs, cost, [&](int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { shift(a, begin, end, t); });
  });
}

// ---- Mamba-2 ----

constexpr int kScanTokens = 32;  // tokens whose numbers are in the cache together
constexpr int kScanRows = kRegisters >= 32 ? 8 : 4;  // rows of a state in registers, of two vectors

// Advances R rows and V vectors of columns of a state by some tokens. Each sum runs over the rows in
// order, so R does not change its bits. `last`: columns of the last vector.
template <int R, int V>
INLINE void scan_rows(const float* from, float* to, int64_t columns, int last, const float* decay,
                      const float* x, float* y, int64_t width, const float* b, const float* c,
                      int64_t rows, int64_t tokens) {
  vf s[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      s[r][v] = from ? load(from + r * columns + v * W, v + 1 < V ? W : last) : vf{};
  for (int64_t t = 0; t < tokens; t++, x += width, y += width, b += rows, c += rows) {
    const vf a = splat(decay[t]);
    vf in[V], sum[V];
    UNROLL for (int v = 0; v < V; v++) in[v] = load(x + v * W), sum[v] = load(y + v * W);
    UNROLL for (int r = 0; r < R; r++) {
      const vf key = splat(b[r]), query = splat(c[r]);
      UNROLL for (int v = 0; v < V; v++) {
        s[r][v] = fma(a, s[r][v], key * in[v]);
        sum[v] = fma(query, s[r][v], sum[v]);
      }
    }
    UNROLL for (int v = 0; v < V; v++) store(y + v * W, sum[v]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(to + r * columns + v * W, s[r][v], v + 1 < V ? W : last);
}

// Calls f(first token, end) for pieces of a request's tokens. Only the last token of a piece may
// have slots.
template <class F>
INLINE void for_pieces(const int32_t* slots, const int32_t* snapshots, int64_t begin, int64_t end, F f) {
  while (begin < end) {
    int64_t stop = begin + 1;
    while (stop < end && stop - begin < kScanTokens && slots[stop - 1] < 0 && snapshots[stop - 1] < 0)
      stop++;
    f(begin, stop);
    begin = stop;
  }
}

struct ScanScratch {
  float *state, *x, *y, *b, *c;
  int64_t width;  // of a row of x and y: whole vectors

  ScanScratch(int64_t rows, int64_t columns) {
    width = ceil_div(columns, 2 * W) * 2 * W;
    const int64_t sizes[] = {rows * width, kScanTokens * width, kScanTokens * width,
                             kScanTokens * ceil_div(rows, W) * W, kScanTokens * ceil_div(rows, W) * W};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    float* at = static_cast<float*>(scratch(total * sizeof(float)));
    float** parts[] = {&state, &x, &y, &b, &c};
    for (int i = 0; i < 5; at += sizes[i++]) *parts[i] = at;
  }
};

// One task is a head of a request. Its state [state_size, head_size] has one column for each number
// of x, so no sum runs across lanes.
template <class T>
void scan_head(const SsdArgs& a, int64_t r, int64_t head, T) {
  const int64_t columns = a.head_size, rows = a.state_size, size = rows * columns;
  const int64_t group = head / (a.heads / a.groups);
  const ScanScratch own(rows, columns);
  const float rate = -exp(splat(a.a_log[head]))[0], skip = a.skip[head], bias = a.dt_bias[head];
  const float* from = a.sources[r] < 0 ? nullptr : a.state + a.sources[r] * a.state_stride + head * size;
  for_pieces(a.slots, a.snapshots, a.query_start_loc[r], a.query_start_loc[r + 1], [&](int64_t begin,
                                                                                    int64_t end) {
    const int64_t tokens = end - begin;
    alignas(64) float dt[kScanTokens] = {}, decay[kScanTokens];
    for (int64_t t = 0; t < tokens; t++)
      dt[t] = load(static_cast<const T*>(a.dt) + (begin + t) * a.dt_stride + head, 1)[0];
    for (int64_t t = 0; t < tokens; t += W) {
      const vf step = clamp(softplus(load(dt + t) + bias), a.dt_min, a.dt_max);
      store(dt + t, step), store(decay + t, exp_or_zero(step * rate));
    }
    for (int64_t t = 0; t < tokens; t++) {
      const T* x = static_cast<const T*>(a.x) + (begin + t) * a.x_stride + head * columns;
      for_lanes(columns, [&](int64_t i, int n) {
        store(own.x + t * own.width + i, load(x + i, n) * dt[t]);
        store(own.y + t * own.width + i, vf{});
      });
      const T* b = static_cast<const T*>(a.b) + (begin + t) * a.b_stride + group * rows;
      const T* c = static_cast<const T*>(a.c) + (begin + t) * a.c_stride + group * rows;
      for_lanes(rows, [&](int64_t i, int n) {
        store(own.b + t * rows + i, load(b + i, n), n), store(own.c + t * rows + i, load(c + i, n), n);
      });
    }
    const int32_t slot = a.slots[end - 1], kept = a.snapshots[end - 1];
    const int32_t target = slot >= 0 ? slot : kept;
    float* to = target < 0 ? own.state : a.state + target * a.state_stride + head * size;
    const auto advance = [&]<int R>(int64_t row) {
      const int64_t at = row * columns;
      for (int64_t i = 0; i < columns; i += 2 * W) {
        const float* begin_from = from ? from + at + i : nullptr;
        const int left = int(columns - i);
        if (left > W)
          scan_rows<R, 2>(begin_from, to + at + i, columns, min(left - W, W), decay, own.x + i, own.y + i,
                          own.width, own.b + row, own.c + row, rows, tokens);
        else
          scan_rows<R, 1>(begin_from, to + at + i, columns, left, decay, own.x + i, own.y + i, own.width,
                          own.b + row, own.c + row, rows, tokens);
      }
    };
    int64_t row = 0;
    for (; row + kScanRows <= rows; row += kScanRows) advance.template operator()<kScanRows>(row);
    for (; row < rows; row++) advance.template operator()<1>(row);
    if (slot >= 0 && kept >= 0)
      memcpy(a.state + kept * a.state_stride + head * size, to, size * sizeof(float));
    from = to;
    for (int64_t t = 0; t < tokens; t++) {
      const T* x = static_cast<const T*>(a.x) + (begin + t) * a.x_stride + head * columns;
      T* out = static_cast<T*>(a.out) + (begin + t) * a.out_stride + head * columns;
      for_lanes(columns, [&](int64_t i, int n) {
        store(out + i, fma(splat(skip), load(x + i, n), load(own.y + t * own.width + i)), n);
      });
    }
  });
}

void ssd(const SsdArgs& a) {
  const int64_t tokens = a.query_start_loc[a.num_reqs];
  const int64_t cost = tokens * a.heads * a.state_size * ceil_div(a.head_size, W) * 3;
  parallel_for(a.num_reqs * a.heads, cost, [&](int64_t task) {
    with_type(a.dtype, [&](auto t) { scan_head(a, task / a.heads, task % a.heads, t); });
  });
}

// ---- Mamba-1 ----

// Vectors of channels are the columns of their states; each sum runs over the rows in order.
struct ChannelScratch {
  float *rate, *state;  // of each vector of channels in turn, [rows] vectors
  float *b, *c;         // [kScanTokens, width]
  int64_t width;

  explicit ChannelScratch(int64_t rows) {
    width = ceil_div(rows, W) * W;
    rate = static_cast<float*>(scratch((2 * rows * kConvTile + 2 * kScanTokens * width) * sizeof(float)));
    state = rate + rows * kConvTile;
    b = state + rows * kConvTile;
    c = b + kScanTokens * width;
  }
};

// Advances n <= W channels, from channel `at` on, by the tokens [begin, end).
template <class T>
INLINE void scan_vector(const SelectiveScanArgs& a, const ChannelScratch& own, const float* rate,
                        float* state, int64_t at, int n, int64_t begin, int64_t end) {
  const vf bias = load(a.dt_bias + at, n), skip = load(a.skip + at, n);
  const float *b = own.b, *c = own.c;
  for (int64_t token = begin; token < end; token++, b += own.width, c += own.width) {
    const vf x = load(static_cast<const T*>(a.x) + token * a.x_stride + at, n);
    const vf dt = softplus(load(static_cast<const T*>(a.dt) + token * a.dt_stride + at, n) + bias);
    const vf in = dt * x;
    vf sum = skip * x;
    for (int64_t row = 0; row < a.state_size; row++) {
      const vf decay = exp_or_zero(dt * load(rate + row * W));
      const vf s = fma(decay, load(state + row * W), b[row] * in);
      store(state + row * W, s);
      sum = fma(c[row], s, sum);
    }
    const vf gate = load(static_cast<const T*>(a.gate) + token * a.gate_stride + at, n);
    store(static_cast<T*>(a.out) + token * a.out_stride + at, sum * silu(gate), n);
  }
}

// One task is a tile of channels of a request.
template <class T>
void scan_channels(const SelectiveScanArgs& a, int64_t begin_task, int64_t end_task, T) {
  const int64_t rows = a.state_size;
  const ChannelScratch own(rows);
  int64_t loaded = -1;
  for (int64_t task = begin_task; task < end_task; task++) {
    const int64_t tile = task / a.num_reqs, r = task % a.num_reqs, first = tile * kConvTile;
    const int64_t count = min<int64_t>(kConvTile, a.channels - first);
    // Calls f(vector of the tile, number of a state, lanes).
    const auto for_numbers = [&](auto f) {
      for_lanes(count, [&](int64_t i, int n) {
        for (int64_t row = 0; row < rows; row++)
          f(i * rows + row * W, row * a.channels + first + i, n);
      });
    };
    if (tile != loaded)
      for_numbers([&](int64_t i, int64_t at, int n) { store(own.rate + i, -exp(load(a.a_log + at, n))); });
    loaded = tile;
    const int64_t source = a.sources[r];
    for_numbers([&](int64_t i, int64_t at, int n) {
      store(own.state + i, source < 0 ? vf{} : load(a.state + source * a.state_stride + at, n));
    });
    for_pieces(a.slots, a.snapshots, a.query_start_loc[r], a.query_start_loc[r + 1], [&](int64_t begin,
                                                                                      int64_t end) {
      for (int64_t token = begin; token < end; token++) {
        const T* b = static_cast<const T*>(a.b) + token * a.b_stride;
        const T* c = static_cast<const T*>(a.c) + token * a.c_stride;
        const int64_t at = (token - begin) * own.width;
        for_lanes(rows, [&](int64_t i, int n) {
          store(own.b + at + i, load(b + i, n)), store(own.c + at + i, load(c + i, n));
        });
      }
      for_lanes(count, [&](int64_t i, int n) {
        scan_vector<T>(a, own, own.rate + i * rows, own.state + i * rows, first + i, n, begin, end);
      });
      for_slots(a.slots, a.snapshots, end - 1, [&](int64_t slot) {
        for_numbers([&](int64_t i, int64_t at, int n) {
          store(a.state + slot * a.state_stride + at, load(own.state + i), n);
        });
      });
    });
  }
}

void selective_scan(const SelectiveScanArgs& a) {
  const int64_t tiles = ceil_div(a.channels, kConvTile);
  const int64_t cost = a.query_start_loc[a.num_reqs] * ceil_div(a.channels, W) * a.state_size * 20;
  parallel_ranges(tiles * a.num_reqs, cost, [&](int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { scan_channels(a, begin, end, t); });
  });
}

OCTAVO_END
