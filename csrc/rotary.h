// Rotary position embedding, in place (Su et al., "RoFormer", section 3.4).
#pragma once
#include "norm.h"

OCTAVO_BEGIN

template <class T>
INLINE void rotate_head(T* x, const float* cos, int64_t half, bool is_neox) {
  const float* sin = cos + half;
  if (is_neox) {  // pairs (i, i + half)
    for_lanes(half, [&](int64_t i, int n) {
      vf a = load(x + i, n), b = load(x + half + i, n), c = load(cos + i, n), s = load(sin + i, n);
      store(x + i, fma(a, c, -(b * s)), n);
      store(x + half + i, fma(b, c, a * s), n);
    });
    return;
  }
  for_lanes(half, [&](int64_t i, int n) {  // pairs (2 i, 2 i + 1)
    T even[W] = {}, odd[W] = {};
    for (int j = 0; j < n; j++) even[j] = x[2 * (i + j)], odd[j] = x[2 * (i + j) + 1];
    vf a = load(even), b = load(odd), c = load(cos + i, n), s = load(sin + i, n);
    store(even, fma(a, c, -(b * s)));
    store(odd, fma(b, c, a * s));
    for (int j = 0; j < n; j++) x[2 * (i + j)] = even[j], x[2 * (i + j) + 1] = odd[j];
  });
}

void rotary(const RotaryArgs& a) {
  const int64_t heads = a.query_heads + a.key_heads;
  parallel_for(a.tokens, a.tokens * heads * ceil_div(a.rotary_dim, W), [&](int64_t token) {
    const float* cos = a.cos_sin + a.positions[token] * a.rotary_dim;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      T* query = static_cast<T*>(a.query) + token * a.query_stride;
      T* key = static_cast<T*>(a.key) + token * a.key_stride;
      for (int64_t h = 0; h < a.query_heads; h++)
        rotate_head(query + h * a.query_head_stride, cos, a.rotary_dim / 2, a.is_neox);
      for (int64_t h = 0; h < a.key_heads; h++)
        rotate_head(key + h * a.key_head_stride, cos, a.rotary_dim / 2, a.is_neox);
    });
  });
}

OCTAVO_END
