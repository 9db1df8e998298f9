// RMSNorm and LayerNorm, row by row, rounded like Hugging Face.
#pragma once
#include "parallel.h"

OCTAVO_BEGIN

// Calls f(start, lanes) for each vector of a row of n.
template <class F>
INLINE void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, int(n - i));
}

// Calls f(a number of the type, row, head) for each head of each row.
template <class F>
INLINE void norm_rows(int64_t rows, int64_t heads, int64_t dim, DType dtype, F f) {
  parallel_for(rows * heads, rows * heads * ceil_div(dim, W) * 4, [&](int64_t task) {
    with_type(dtype, [&](auto t) { f(t, task / heads, task % heads); });
  });
}

template <class T>
INLINE float mean_square(const T* x, int64_t dim) {
  vf sum{};
  for_lanes(dim, [&](int64_t i, int n) {
    vf v = load(x + i, n);
    sum = fma(v, v, sum);
  });
  return reduce_sum(sum) / float(dim);
}

// Returns a row of x, or its sum with the residual if there is one, which is stored.
template <class T, class Args>
INLINE const T* with_residual(const Args& a, const T* x, int64_t row) {
  if (!a.residual) return x;
  const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
  T* sum = static_cast<T*>(a.residual_out) + row * a.residual_stride;
  for_lanes(a.dim, [&](int64_t i, int n) {
    store(sum + i, load(x + i, n) + load(residual + i, n), n);
  });
  return sum;
}

void rms_norm(const RmsNormArgs& a) {
  norm_rows(a.rows, a.heads, a.dim, a.dtype, [&](auto t, int64_t row, int64_t head) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride + head * a.out_head_stride;
    const T* w = static_cast<const T*>(a.weight);
    const T* from = with_residual(a, x, row);
    const float scale = 1.0f / sqrtf(mean_square(from, a.dim) + a.eps);
    for_lanes(a.dim, [&](int64_t i, int n) {
      vf v = load(from + i, n) * scale, weight = load(w + i, n);
      // Llama rounds, then multiplies; Gemma multiplies by (1 + weight) in float32
      v = a.weight_offset == 0.0f ? round_to(v, t) * weight : v * (weight + a.weight_offset);
      store(out + i, v, n);
    });
  });
}

struct Moments {
  float mean, variance;
};

template <class T>
INLINE Moments moments(const T* x, int64_t dim) {
  vf sum{};
  for_lanes(dim, [&](int64_t i, int n) { sum += load(x + i, n); });
  const float mean = reduce_sum(sum) / float(dim);
  vf squares{};
  for_lanes(dim, [&](int64_t i, int n) {
    vf v = load(x + i, n) - mean;
    v = lanes() < float(n) ? v : vf{};
    squares = fma(v, v, squares);
  });
  return {mean, reduce_sum(squares) / float(dim)};
}

void layer_norm(const LayerNormArgs& a) {
  norm_rows(a.rows, 1, a.dim, a.dtype, [&](auto t, int64_t row, int64_t) {
    using T = decltype(t);
    const T* x = with_residual(a, static_cast<const T*>(a.x) + row * a.x_stride, row);
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    const T* w = static_cast<const T*>(a.weight);
    const T* bias = static_cast<const T*>(a.bias);
    const auto [mean, variance] = moments(x, a.dim);
    const float scale = 1.0f / sqrtf(variance + a.eps);
    for_lanes(a.dim, [&](int64_t i, int n) {
      vf v = (load(x + i, n) - mean) * scale * (load(w + i, n) + a.weight_offset);
      if (bias) v += load(bias + i, n);
      store(out + i, v, n);
    });
  });
}

void rms(const RmsArgs& a) {
  norm_rows(a.rows, 1, a.dim, a.dtype, [&](auto t, int64_t row, int64_t) {
    using T = decltype(t);
    const float square = mean_square(static_cast<const T*>(a.x) + row * a.x_stride, a.dim);
    const float root = sqrtf(square < a.least ? a.least : square);
    store(static_cast<T*>(a.out) + row, splat(a.inverse ? 1.0f / root : root), 1);
  });
}

void cutoff(const CutoffArgs& a) {
  norm_rows(a.rows, 1, a.dim, a.dtype, [&](auto t, int64_t row, int64_t) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    const auto [mean, variance] = moments(x, a.dim);
    const float least = mean + a.multiplier * sqrtf(variance);
    for_lanes(a.dim, [&](int64_t i, int n) {
      const vf v = load(x + i, n) - least;
      store(out + i, v < 0.0f ? vf{} : v, n);
    });
  });
}

OCTAVO_END
