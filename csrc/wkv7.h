// Recurrence of RWKV 7 (Peng et al., arXiv:2503.14456, section 4), token by token. The state of a head
// is a matrix S with a row for each key channel. With the vectors r (receptance), w, k (key), a, v of a
// token and k' = k * (1 + (a - 1) * key_rate), kappa = k * removal / |k * removal|:
//   S = w * S - (kappa * a) (x) (kappa . S) + k' (x) v;  result = r . S
//   out = gate * (norm(result) * weight + bias + (r . (bonus * k')) v)
// Here w = exp(-e^-0.5 sigmoid(decay)), a = sigmoid(rate), and v is the value, or its mean with the
// first layer's: value + sigmoid(value_rate) * (first_value - value).
//
// It is the gated delta rule with other vectors and one more product. The pass over a tile of columns
// is that of delta_rule.h.
#pragma once
#include "delta_rule.h"

OCTAVO_BEGIN

constexpr float kLeastNorm = 1e-12f;  // of kappa before it is divided by its norm

// Numbers of a head for the next tokens. Rows have `numbers.stride` numbers.
struct Wkv7Tokens {
  DeltaTokens numbers;
  float value_product[kStateTokens], bonus[kStateTokens];  // r . k', r . (bonus * k')
  float *values, *results;

  static int64_t stride_of(const Wkv7Args& a) { return ceil_div(a.size, 32) * 32; }
  static int64_t memory_of(const Wkv7Args& a) { return 7 * kStateTokens * stride_of(a); }
  Wkv7Tokens(const Wkv7Args& a, float* memory) {
    numbers.stride = stride_of(a);
    float** rows[] = {&numbers.key, &numbers.read_key, &numbers.read_query, &numbers.decays,
                      &numbers.write, &values, &results};
    for (float** row : rows) *row = memory, memory += kStateTokens * numbers.stride;
  }
};

template <class T>
INLINE void prepare_wkv7(const Wkv7Args& a, Wkv7Tokens& to, int64_t first, int64_t count, int64_t head) {
  const int64_t column = head * a.size;
  for (int64_t t = 0; t < count; t++) {
    const auto row = [&](const void* x, int64_t stride) {
      return static_cast<const T*>(x) + (first + t) * stride + column;
    };
    const T* key = row(a.key, a.key_stride);
    vf squares{};
    for_lanes(a.size, [&](int64_t i, int n) {
      const vf x = load(key + i, n) * load(a.removal + column + i, n);
      squares = fma(x, x, squares);
    });
    const float inverse = 1.0f / max(sqrtf(reduce_sum(squares)), kLeastNorm);
    const T *receptance = row(a.receptance, a.receptance_stride), *decays = row(a.decay, a.decay_stride);
    const T *rates = row(a.rate, a.rate_stride), *values = row(a.value, a.value_stride);
    const DeltaTokens& numbers = to.numbers;
    const int64_t at = t * numbers.stride;
    vf product{}, value_product{}, bonus{};
    for_lanes(a.size, [&](int64_t i, int n) {
      const vf r = load(receptance + i, n), k = load(key + i, n), rate = sigmoid(load(rates + i, n));
      const vf decay = exp(-0.606530660f * sigmoid(load(decays + i, n)));
      const vf kappa = k * load(a.removal + column + i, n) * inverse;
      const vf write = k * fma(rate - 1.0f, load(a.key_rate + column + i, n), splat(1.0f));
      store(numbers.key + at + i, kappa * rate, n);
      store(numbers.read_key + at + i, -kappa, n);
      store(numbers.read_query + at + i, r * decay, n);
      store(numbers.decays + at + i, decay, n);
      store(numbers.write + at + i, write, n);
      product = fma(r, kappa * rate, product);
      value_product = fma(r, write, value_product);
      bonus = fma(r, write * load(a.bonus + column + i, n), bonus);
      vf value = load(values + i, n);
      if (a.first_value) {
        const vf share = sigmoid(load(row(a.value_rate, a.value_rate_stride) + i, n));
        value = fma(share, load(row(a.first_value, a.first_value_stride) + i, n) - value, value);
      }
      store(to.values + at + i, value, n);
    });
    to.numbers.product[t] = reduce_sum(product);
    to.value_product[t] = reduce_sum(value_product);
    to.bonus[t] = reduce_sum(bonus);
  }
}

// Computes the results of `count` prepared tokens, from token `first` on, in a tile of columns.
NOINLINE void wkv7_tile(const Wkv7Args& a, const Wkv7Tokens& tokens, int64_t first, int64_t count,
                        int64_t head, int64_t column, float* tile) {
  const DeltaTokens& numbers = tokens.numbers;
  DeltaSums sums;
  vf value[kStateVectors] = {};
  delta_pass<false, true, true>(tile, a.size, numbers, 0, value, 0, sums);
  for (int64_t t = 0; t < count; t++) {
    vf read[kStateVectors];
    UNROLL for (int v = 0; v < kStateVectors; v++) {
      const int64_t at = t * numbers.stride + column + v * W;
      const int n = int(max<int64_t>(min<int64_t>(W, a.size - column - v * W), 0));
      read[v] = sums.key[v], value[v] = load(tokens.values + at, n);
      const vf before = fma(numbers.product[t], read[v], sums.query[v]);
      store(tokens.results + at, fma(tokens.value_product[t], value[v], before), n);
    }
    if (t + 1 < count)
      delta_pass<true, true, true, true>(tile, a.size, numbers, t, read, t + 1, sums, value);
    else
      delta_pass<true, false, true, true>(tile, a.size, numbers, t, read, t, sums, value);
    keep_tile(a, a.size, a.size, first + t, head * a.size * a.size, tile, column);
  }
}

template <class T>
INLINE void finish_wkv7(const Wkv7Args& a, const Wkv7Tokens& tokens, int64_t first, int64_t count, int64_t head) {
  const int64_t column = head * a.size;
  for (int64_t t = 0; t < count; t++) {
    const float* result = tokens.results + t * tokens.numbers.stride;
    const float* value = tokens.values + t * tokens.numbers.stride;
    const T* gate = static_cast<const T*>(a.gate) + (first + t) * a.gate_stride + column;
    T* out = static_cast<T*>(a.out) + (first + t) * a.out_stride + column;
    const auto [mean, variance] = moments(result, a.size);
    const float scale = 1.0f / sqrtf(variance + a.eps);
    for_lanes(a.size, [&](int64_t i, int n) {
      const vf normed = (load(result + i, n) - mean) * scale;
      vf v = fma(normed, load(a.weight + column + i, n), load(a.bias + column + i, n));
      v = fma(tokens.bonus[t], load(value + i, n), v);
      store(out + i, v * load(gate + i, n), n);
    });
  }
}

void wkv7(const Wkv7Args& a) {
  const int64_t tiles = ceil_div(a.size, kStateColumns), tile_numbers = a.size * kStateColumns;
  const int64_t tokens = a.query_start_loc[a.num_reqs] - a.query_start_loc[0];
  const int64_t cost = (tokens + a.num_reqs) * a.heads * a.size * tiles * kStateVectors * 5;
  parallel_for(a.heads * a.num_reqs, cost, [&](int64_t task) {
    const int64_t request = task % a.num_reqs, head = task / a.num_reqs;
    const int64_t begin = a.query_start_loc[request], end = a.query_start_loc[request + 1];
    float* memory = static_cast<float*>(
        scratch((Wkv7Tokens::memory_of(a) + tiles * tile_numbers) * sizeof(float)));
    Wkv7Tokens prepared(a, memory);
    memory += Wkv7Tokens::memory_of(a);
    const int64_t number = head * a.size * a.size;
    float* state = a.sources[request] < 0 ? nullptr : a.state + a.sources[request] * a.state_stride + number;
    for (int64_t first = begin; first < end; first += kStateTokens) {
      const int64_t count = min(kStateTokens, end - first);
      with_type(a.dtype, [&](auto t) {
        using T = decltype(t);
        prepare_wkv7<T>(a, prepared, first, count, head);
        for (int64_t i = 0; i < tiles; i++) {
          float* tile = memory + i * tile_numbers;
          if (first == begin) load_tile(a.size, a.size, tile, state, i * kStateColumns);
          wkv7_tile(a, prepared, first, count, head, i * kStateColumns, tile);
        }
        finish_wkv7<T>(a, prepared, first, count, head);
      });
    }
  });
}

OCTAVO_END
