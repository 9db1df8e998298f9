// Layers of adapters that replace the model's. The products of a row are added in the order of the inputs.
#pragma once
#include "lora.h"

OCTAVO_BEGIN

// Returns the number of rows whose adapter has a layer of its own.
template <class Args>
INLINE int64_t replaced_rows(const Args& a) {
  int64_t count = 0;
  for (int64_t row = 0; row < a.rows; row++) count += a.slots[row] >= 0 && a.layers[a.slots[row]].weight;
  return count;
}

template <class T, class O>
void replace_linear(const ReplaceLinearArgs& a) {
  const int64_t panels = ceil_div(a.n, kLoraPanel);
  // Tasks have fixed groups of rows, and find the runs of rows with one adapter within them.
  const int64_t groups = ceil_div(a.rows, kExpandRows), changed = replaced_rows(a);
  if (changed == 0) return;
  parallel_for(groups * panels, changed * a.k * a.n / W, [&](int64_t task) {
    const int64_t begin = task % groups * kExpandRows, end = min<int64_t>(a.rows, begin + kExpandRows);
    const int64_t panel = task / groups, col = panel * kLoraPanel, width = min(kLoraPanel, a.n - col);
    float* x = nullptr;
    for (int64_t row = begin, next; row < end; row = next) {
      next = row + 1;
      while (next < end && a.slots[next] == a.slots[row]) next++;
      if (a.slots[row] < 0) continue;
      const WholeLayer& layer = a.layers[a.slots[row]];
      if (!layer.weight) continue;
      if (!x) x = static_cast<float*>(scratch(kExpandRows * a.k * sizeof(float), 1));
      O* out = static_cast<O*>(a.out) + row * a.out_stride + col;
      float sums[kExpandRows * kLoraPanel];
      for (int64_t r = 0; r < next - row; r++) {
        const T* source = static_cast<const T*>(a.x) + (row + r) * a.x_stride;
        for_lanes(a.k, [&](int64_t i, int n) { store(x + r * a.k + i, load(source + i, n), n); });
        for_lanes(width, [&](int64_t i, int n) {
          const T* bias = static_cast<const T*>(layer.bias) + col + i;
          store(sums + r * kLoraPanel + i, layer.bias ? load(bias, n) : vf{}, n);
        });
      }
      const T* weight = static_cast<const T*>(layer.weight) + col * a.k;
      if (next - row == kExpandRows)
        expand<kExpandRows, false>(x, a.k, weight, nullptr, a.k, sums, kLoraPanel, width);
      else
        for (int64_t r = 0; r < next - row; r++)
          expand<1, false>(x + r * a.k, a.k, weight, nullptr, a.k, sums + r * kLoraPanel, kLoraPanel, width);
      for (int64_t r = 0; r < next - row; r++)
        for_lanes(width, [&](int64_t i, int n) {
          store(out + r * a.out_stride + i, load(sums + r * kLoraPanel + i, n), n);
        });
    }
  });
}

void replace_linear(const ReplaceLinearArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.out_dtype == DType::f32)
      replace_linear<T, float>(a);
    else
      replace_linear<T, T>(a);
  });
}

void replace_embedding(const ReplaceEmbeddingArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(a.rows, replaced_rows(a) * a.n / W, [&](int64_t row) {
      if (a.slots[row] < 0) return;
      const WholeLayer& layer = a.layers[a.slots[row]];
      const int64_t id = a.ids[row];
      if (!layer.weight || id < 0 || id >= a.vocab) return;
      memcpy(static_cast<T*>(a.out) + row * a.out_stride,
             static_cast<const T*>(layer.weight) + id * a.n, a.n * sizeof(T));
    });
  });
}

OCTAVO_END
