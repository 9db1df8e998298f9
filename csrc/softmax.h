// Row operations on float32 logits for sampling.
#pragma once
#include "norm.h"
#include "vmath.h"

OCTAVO_BEGIN

INLINE float row_max(const float* x, int64_t dim) {  // ignores NaN
  vf m = splat(-INFINITY);
  for_lanes(dim, [&](int64_t i, int n) {
    vf v = load(x + i, n);
    v = lanes() < float(n) ? v : m;
    m = vmax(v, m);
  });
  return reduce_max(m);
}

// Softmax of a row of numbers, or its logarithm; out may be x.
INLINE void softmax_row(const float* x, float* out, int64_t dim, bool log_of) {
  const float m = row_max(x, dim);
  vf sum{};
  for_lanes(dim, [&](int64_t i, int n) {
    vf e = exp(load(x + i, n) - m);
    e = lanes() < float(n) ? e : vf{};
    if (!log_of) store(out + i, e, n);
    sum += e;
  });
  const vf total = splat(reduce_sum(sum));
  const float log_total = log(total)[0];
  for_lanes(dim, [&](int64_t i, int n) {
    vf v = log_of ? load(x + i, n) - m - log_total : load(out + i, n) / total;
    store(out + i, v, n);
  });
}

void softmax(const SoftmaxArgs& a) {
  parallel_for(a.rows, a.rows * a.dim / W * 16, [&](int64_t row) {
    softmax_row(a.x + row * a.x_stride, a.out + row * a.dim, a.dim, a.log);
  });
}

void argmax(const ArgmaxArgs& a) {
  parallel_for(a.rows, a.rows * a.dim / W * 4, [&](int64_t row) {
    const float* x = a.x + row * a.x_stride;
    const float m = row_max(x, a.dim);
    int64_t i = 0;
    while (i < a.dim && x[i] != m) i++;
    a.out[row] = i < a.dim ? i : 0;  // only NaN
  });
}

OCTAVO_END
