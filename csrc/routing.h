// Choice of experts, and the sum of their results.
#pragma once
#include <algorithm>

#include "softmax.h"

OCTAVO_BEGIN

// Scores of a token's experts, from first to last.
INLINE void score_experts(const RouteArgs& a, const float* logits, float* scores) {
  auto apply = [&](auto f) {
    for_lanes(a.experts, [&](int64_t i, int n) { store(scores + i, f(load(logits + i, n)), n); });
  };
  switch (a.score) {
    case Score::softmax: return softmax_row(logits, scores, a.experts, false);
    case Score::sigmoid: return apply([](vf x) { return sigmoid(x); });
    case Score::sqrt_softplus:
      return apply([](vf x) {
        vf v = softplus(x);
        UNROLL for (int i = 0; i < W; i++) v[i] = sqrtf(v[i]);
        return v;
      });
    case Score::none: return apply([](vf x) { return x; });
  }
}

// Returns the index of the largest of some numbers, which it sets to minus infinity; -1 if all are
// that.
INLINE int64_t take_largest(float* x, int64_t count) {
  const float most = row_max(x, count);
  if (!(most > -INFINITY)) return -1;
  int64_t i = 0;
  while (x[i] != most) i++;
  x[i] = -INFINITY;
  return i;
}

// Keeps the numbers of the best groups; the others become minus infinity.
INLINE void choose_groups(const RouteArgs& a, float* choice, float* best, float* copy) {
  const int64_t size = a.experts / a.groups;
  for (int64_t g = 0; g < a.groups; g++) {
    memcpy(copy, choice + g * size, size * sizeof(float));
    best[g] = 0;
    for (int64_t i = 0; i < a.group_best; i++) {
      const int64_t at = take_largest(copy, size);
      best[g] += at < 0 ? -INFINITY : choice[g * size + at];
    }
  }
  memcpy(copy, best, a.groups * sizeof(float));
  for (int64_t i = 0; i < a.top_groups; i++) {
    const int64_t at = take_largest(copy, a.groups);
    if (at >= 0) best[at] = INFINITY;
  }
  for (int64_t g = 0; g < a.groups; g++)
    if (best[g] != INFINITY)
      for (int64_t i = 0; i < size; i++) choice[g * size + i] = -INFINITY;
}

// Returns the weight of a chosen expert by SparseMixer (Liu et al., "GRIN", arXiv:2409.12136): the
// softmax over it and those experts not chosen yet whose scores are near to its own.
INLINE float sparse_mixer_weight(const RouteArgs& a, const float* scores, const float* choice,
                                 int64_t id, float* copy) {
  const float most = scores[id];
  for (int64_t i = 0; i < a.experts; i++) {
    const float magnitude = fabsf(scores[i]);
    const bool far = (most - scores[i]) / (magnitude < most ? most : magnitude) > a.tolerance;
    const bool taken = choice[i] == -INFINITY && scores[i] == scores[i];  // NaN spoils the weight
    copy[i] = i != id && (taken || far) ? -INFINITY : scores[i];
  }
  softmax_row(copy, copy, a.experts, false);
  return copy[id];
}

void route(const RouteArgs& a) {
  parallel_for(a.tokens, a.tokens * a.experts / W * (16 + 4 * a.top_k), [&](int64_t token) {
    float* scores = static_cast<float*>(scratch(4 * a.experts * sizeof(float)));
    float *choice = scores + a.experts, *copy = choice + a.experts, *best = copy + a.experts;
    int32_t* ids = a.ids + token * a.top_k;
    float* weights = a.weights + token * a.top_k;
    const float* logits = a.logits + token * a.logits_stride;
    if (a.soft_cap != 0.0f) {
      for_lanes(a.experts, [&](int64_t i, int n) {
        store(copy + i, soft_cap(load(logits + i, n), a.soft_cap), n);
      });
      logits = copy;
    }
    score_experts(a, logits, scores);
    for (int64_t i = 0; i < a.experts; i++) {
      const float v = a.bias ? scores[i] + a.bias[i] : scores[i];
      choice[i] = v == v ? v : -INFINITY;
    }
    if (a.groups > 1) choose_groups(a, choice, best, copy);
    int64_t next = 0;  // expert where no number is left
    for (int64_t i = 0; i < a.top_k; i++) {
      int64_t id = take_largest(choice, a.experts);
      if (id < 0) {
        while (std::find(ids, ids + i, int32_t(next)) != ids + i) next++;
        id = next;
      }
      ids[i] = int32_t(id);
      weights[i] = a.tolerance ? sparse_mixer_weight(a, scores, choice, id, copy) : scores[id];
    }
    if (a.softmax_chosen) softmax_row(weights, weights, a.top_k, false);
    if (a.renormalize) {
      float sum = 0;
      for (int64_t i = 0; i < a.top_k; i++) sum += weights[i];
      sum += a.epsilon;
      const float divisor = sum < a.least ? a.least : sum;
      for (int64_t i = 0; i < a.top_k; i++) weights[i] = weights[i] / divisor;
    }
    for (int64_t i = 0; i < a.top_k; i++) {
      weights[i] *= a.scale;
      if (a.factors) weights[i] *= a.factors[ids[i]];
    }
  });
}

void sum_experts(const SumExpertsArgs& a) {
  const int64_t pieces = ceil_div(a.dim, kPiece);
  parallel_for(a.tokens * pieces, a.tokens * a.dim / W * 4 * a.top_k, [&](int64_t task) {
    const int64_t token = task / pieces, start = task % pieces * kPiece;
    const int32_t* places = a.places + token * a.top_k;
    const float* weights = a.weights ? a.weights + token * a.top_k : nullptr;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* x = static_cast<const T*>(a.x) + start;
      T* out = static_cast<T*>(a.out) + token * a.out_stride + start;
      for_lanes(min(kPiece, a.dim - start), [&](int64_t i, int n) {
        vf sum{};
        for (int64_t j = 0; j < a.top_k; j++)
          sum = fma(weights ? weights[j] : 1.0f, load(x + places[j] * a.x_stride + i, n), sum);
        store(out + i, sum, n);
      });
    });
  });
}

OCTAVO_END
