// Gated delta rule: a matrix of each head is the state of a linear attention (Yang, Kautz,
// Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10), token by token:
//   S = decay * S;  u = beta * (value - key . S);  S = S + key (x) u;  result = query . S
// With a decay for each key channel it is Kimi Delta Attention (arXiv:2510.26692, equation 1).
//
// Columns of S do not depend on each other. A tile of columns stays in the L1 cache for several
// tokens. One pass over it adds key (x) u of a token and computes the products with the next
// token's key and query. Those are products with S before its decay and update:
//   key . (decay * S)  and  query . (decay * S + key (x) u) = query . (decay * S) + (query . key) u
#pragma once
#include "state.h"

OCTAVO_BEGIN

constexpr int kStateVectors = 2;
constexpr int64_t kStateColumns = kStateVectors * W;  // of a tile
constexpr int64_t kStateTokens = 32;  // prepared at once
constexpr float kUnitEps = 1e-6f;  // of the L2 norm of keys and queries

// Numbers of a head for the next tokens. Rows have `stride` numbers.
struct DeltaTokens {
  float decay[kStateTokens], beta[kStateTokens], product[kStateTokens];  // product: query . key
  int64_t stride;
  float *key, *read_key, *read_query;  // the latter two with the decays of their channels
  float* decays;  // of channels; equals read_key and is unused if a head has one decay
  float* write;   // see delta_pass

  static int64_t stride_of(int64_t key_size) { return ceil_div(key_size, 16) * 16; }
  static int64_t numbers(const DeltaRuleArgs& a) {
    return stride_of(a.key_size) * kStateTokens * (a.by_channel ? 4 : 2);
  }
  DeltaTokens() = default;
  DeltaTokens(const DeltaRuleArgs& a, float* memory) : stride(stride_of(a.key_size)), key(memory) {
    const int64_t rows = stride * kStateTokens;
    read_query = key + rows;
    read_key = a.by_channel ? read_query + rows : key;
    decays = a.by_channel ? read_key + rows : key;
  }
};

template <class T>
INLINE void prepare_delta(const DeltaRuleArgs& a, DeltaTokens& to, int64_t first, int64_t count,
                          int64_t head) {
  const float rate = -exp(splat(a.a_log[head]))[0], scale = 1.0f / sqrtf(float(a.key_size));
  float logits[kStateTokens];
  for (int64_t t = 0; t < count; t++)
    logits[t] = load(static_cast<const T*>(a.beta) + (first + t) * a.beta_stride + head, 1)[0];
  for_lanes(count, [&](int64_t i, int n) {
    store(to.beta + i, sigmoid(load(logits + i, n)) * a.beta_scale, n);
  });
  if (!a.by_channel) {
    for (int64_t t = 0; t < count; t++)
      logits[t] = load(static_cast<const T*>(a.decay) + (first + t) * a.decay_stride + head, 1)[0];
    for_lanes(count, [&](int64_t i, int n) {
      store(to.decay + i, exp_or_zero(rate * softplus(load(logits + i, n) + a.dt_bias[head])), n);
    });
  }
  const int64_t key_head = head / (a.heads / a.key_heads);
  for (int64_t t = 0; t < count; t++) {
    const T* k = static_cast<const T*>(a.key) + (first + t) * a.key_stride + key_head * a.key_size;
    const T* q = static_cast<const T*>(a.query) + (first + t) * a.query_stride + key_head * a.key_size;
    vf keys{}, queries{}, product{};
    for_lanes(a.key_size, [&](int64_t i, int n) {
      const vf x = load(k + i, n), y = load(q + i, n);
      keys = fma(x, x, keys), queries = fma(y, y, queries), product = fma(x, y, product);
    });
    const float of_key = 1.0f / sqrtf(reduce_sum(keys) + kUnitEps);
    const float of_query = scale / sqrtf(reduce_sum(queries) + kUnitEps);
    to.product[t] = reduce_sum(product) * of_key * of_query;
    float* row = to.key + t * to.stride;
    for_lanes(a.key_size, [&](int64_t i, int n) {
      const vf x = load(k + i, n) * of_key, y = load(q + i, n) * of_query;
      store(row + i, x, n);
      if (!a.by_channel) return store(to.read_query + t * to.stride + i, y, n);
      const T* logit = static_cast<const T*>(a.decay) + (first + t) * a.decay_stride;
      const int64_t channel = head * a.key_size + i;
      const vf decay = exp_or_zero(rate * softplus(load(logit + channel, n) + load(a.dt_bias + channel, n)));
      store(to.decays + t * to.stride + i, decay, n);
      store(to.read_key + t * to.stride + i, x * decay, n);
      store(to.read_query + t * to.stride + i, y * decay, n);
    });
  }
}

struct DeltaSums {
  vf key[kStateVectors], query[kStateVectors];
};

// One pass over a tile: the update of token t, the products of token `next`, or both. With `Writes`
// the update also adds write (x) value.
template <bool Update, bool Products, bool Channels, bool Writes = false>
INLINE void delta_pass(float* tile, int64_t rows, const DeltaTokens& tokens, int64_t t,
                       const vf (&u)[kStateVectors], int64_t next, DeltaSums& sums,
                       const vf* value = nullptr) {
  const float* key = tokens.key + t * tokens.stride;
  const float* decays = tokens.decays + t * tokens.stride;
  const float* read_key = tokens.read_key + next * tokens.stride;
  const float* read_query = tokens.read_query + next * tokens.stride;
  const vf whole = splat(tokens.decay[t]);
  vf of_key[2][kStateVectors] = {}, of_query[2][kStateVectors] = {};  // of even and odd rows
  const auto row = [&](int64_t i, int odd) __attribute__((always_inline)) {
    // Broadcast once: operands in memory would be loaded for each vector.
    const vf k = splat(key[i]), decay = Channels ? splat(decays[i]) : whole;
    const vf next_key = splat(read_key[i]), next_query = splat(read_query[i]);
    const vf write = Writes ? splat(tokens.write[t * tokens.stride + i]) : vf{};
    UNROLL for (int v = 0; v < kStateVectors; v++) {
      float* at = tile + i * kStateColumns + v * W;
      vf x = load(at);
      if constexpr (Update) {
        x = fma(k, u[v], x * decay);
        if constexpr (Writes) x = fma(write, value[v], x);
        store(at, x);
      }
      if constexpr (Products) {
        of_key[odd][v] = fma(next_key, x, of_key[odd][v]);
        of_query[odd][v] = fma(next_query, x, of_query[odd][v]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 1 < rows; i += 2) row(i, 0), row(i + 1, 1);
  if (i < rows) row(i, 0);
  if constexpr (Products)
    UNROLL for (int v = 0; v < kStateVectors; v++) {
      sums.key[v] = of_key[0][v] + of_key[1][v];
      sums.query[v] = of_query[0][v] + of_query[1][v];
    }
}

// Calls f(number of the tile, number of the state [rows, width], lanes) for each vector of a tile.
template <class F>
INLINE void for_tile(int64_t rows, int64_t width, float* tile, float* state, int64_t column, F f) {
  const int64_t columns = min<int64_t>(kStateColumns, width - column);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t v = 0; v < kStateColumns; v += W)
      f(tile + i * kStateColumns + v, state + i * width + column + v,
        int(max<int64_t>(min<int64_t>(W, columns - v), 0)));
}

// Begins a tile with the state of a head, or with zeros if it is null.
INLINE void load_tile(int64_t rows, int64_t width, float* tile, float* state, int64_t column) {
  if (!state) return void(memset(tile, 0, rows * kStateColumns * sizeof(float)));
  for_tile(rows, width, tile, state, column, [](float* to, float* from, int n) { store(to, load(from, n)); });
}

// Stores a tile after a token in the slots that receive it; `number`: index of the head's first
// number in a slot.
template <class Args>
INLINE void keep_tile(const Args& a, int64_t rows, int64_t width, int64_t token, int64_t number, float* tile,
                      int64_t column) {
  for_slots(a.slots, a.snapshots, token, [&](int64_t slot) {
    for_tile(rows, width, tile, a.state + slot * a.state_stride + number, column,
             [](float* from, float* to, int n) { store(to, load(from), n); });
  });
}

// Computes `count` prepared tokens, from token `first` on, in a tile of columns.
template <class T, bool Channels>
NOINLINE void delta_tile(const DeltaRuleArgs& a, const DeltaTokens& tokens, int64_t first,
                         int64_t count, int64_t head, int64_t column, float* tile) {
  const int64_t columns = min<int64_t>(kStateColumns, a.value_size - column);
  const int64_t number = head * a.key_size * a.value_size;
  const auto lanes_of = [&](int v) { return int(max<int64_t>(min<int64_t>(W, columns - v * W), 0)); };
  DeltaSums sums;
  vf u[kStateVectors] = {};
  delta_pass<false, true, Channels>(tile, a.key_size, tokens, 0, u, 0, sums);
  for (int64_t t = 0; t < count; t++) {
    const int64_t token = first + t, at = head * a.value_size + column;
    const T* value = static_cast<const T*>(a.value) + token * a.value_stride + at;
    T* out = static_cast<T*>(a.out) + token * a.out_stride + at;
    const float decay = Channels ? 1.0f : tokens.decay[t];
    UNROLL for (int v = 0; v < kStateVectors; v++) {
      const int n = lanes_of(v);
      u[v] = tokens.beta[t] * fma(-decay, sums.key[v], load(value + v * W, n));
      store(out + v * W, fma(tokens.product[t], u[v], decay * sums.query[v]), n);
    }
    if (t + 1 < count)
      delta_pass<true, true, Channels>(tile, a.key_size, tokens, t, u, t + 1, sums);
    else
      delta_pass<true, false, Channels>(tile, a.key_size, tokens, t, u, t, sums);
    keep_tile(a, a.key_size, a.value_size, token, number, tile, column);
  }
}

void gated_delta_rule(const DeltaRuleArgs& a) {
  const int64_t tiles = ceil_div(a.value_size, kStateColumns), tile_numbers = a.key_size * kStateColumns;
  // Threads share the columns of a head only if there are too few heads, since each part prepares
  // all tokens again.
  const int64_t parts = max<int64_t>(min(ceil_div(num_threads(), max<int64_t>(a.num_reqs * a.heads, 1)), tiles), 1);
  const int64_t tokens = a.query_start_loc[a.num_reqs] - a.query_start_loc[0];
  const int64_t cost = (tokens + a.num_reqs) * a.heads * a.key_size * tiles * kStateVectors * 4;
  parallel_for(a.heads * parts * a.num_reqs, cost, [&](int64_t task) {
    const int64_t request = task % a.num_reqs, part = task / a.num_reqs % parts;
    const int64_t head = task / a.num_reqs / parts;
    const int64_t begin = a.query_start_loc[request], end = a.query_start_loc[request + 1];
    const int64_t first_tile = part * tiles / parts, last_tile = (part + 1) * tiles / parts;
    float* memory = static_cast<float*>(
        scratch((DeltaTokens::numbers(a) + (last_tile - first_tile) * tile_numbers) * sizeof(float)));
    DeltaTokens prepared(a, memory);
    memory += DeltaTokens::numbers(a);
    const int64_t number = head * a.key_size * a.value_size;
    float* state = a.sources[request] < 0 ? nullptr : a.state + a.sources[request] * a.state_stride + number;
    for (int64_t first = begin; first < end; first += kStateTokens) {
      const int64_t count = min(kStateTokens, end - first);
      with_type(a.dtype, [&](auto t) {
        using T = decltype(t);
        prepare_delta<T>(a, prepared, first, count, head);
        for (int64_t i = first_tile; i < last_tile; i++) {
          float* tile = memory + (i - first_tile) * tile_numbers;
          const int64_t column = i * kStateColumns;
          if (first == begin) load_tile(a.key_size, a.value_size, tile, state, column);
          if (a.by_channel)
            delta_tile<T, true>(a, prepared, first, count, head, column, tile);
          else
            delta_tile<T, false>(a, prepared, first, count, head, column, tile);
        }
      });
    }
  });
}

OCTAVO_END
