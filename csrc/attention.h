// Causal attention over a paged KV cache, for prefill chunks and decode rows alike.
//
// The cache is [num_blocks][2][kv_heads][block_size * head_size]. A block's values are kept as
// [block_size][head_size]; its keys are turned, [head_size][block_size], so that one vector holds one
// dimension of W keys and a score needs no sum across lanes. bfloat16 keys keep two dimensions side
// by side, [head_size / 2][block_size][2], for the dot product of AVX-512.
//
// A row is one query head of one token. It walks the positions that it may see in tiles of kTile, cut
// at absolute positions, with the online softmax of Milakov and Gimelshein (arXiv:1805.02867). What
// it computes depends on these tiles only, not on the rows next to it: a decode row and the same row
// within a prefill chunk give the same bits.
#pragma once
#include "norm.h"
#include "vmath.h"

OCTAVO_BEGIN

constexpr int kTile = 64;  // key positions a softmax step takes; every block size divides it, or 128
constexpr int kTileRows = 36;  // rows that walk the tiles together: full sets of 6 and of 4

// How keys of storage type T meet a query. `Q`: what the query is read as; `kDims`: dimensions in one
// step; `N`: keys in a vector, W or, for blocks smaller than W, half of it.
template <class T>
struct Keys {
  using Q = float;
  static constexpr int kDims = 1;
  template <int N, int R, int V>
  static INLINE void step(vf (&acc)[R][V], const Q* q, int64_t q_stride, const T* const (&k)[V],
                          int64_t offset) {
    vf b[V];
    UNROLL for (int j = 0; j < V; j++) b[j] = load(k[j] + offset, N);
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < V; j++) acc[i][j] = fma(q[i * q_stride], b[j], acc[i][j]);
  }
};

template <int N>
INLINE vu load_pairs(const bf16* p) {
  vu v{};
  memcpy(&v, p, 4 * N);
  return v;
}

template <>
struct Keys<bf16> {
  static constexpr int kDims = 2;
#if defined(__AVX512BF16__)
  using Q = bf16;
#else
  using Q = float;
#endif
  template <int N, int R, int V>
  static INLINE void step(vf (&acc)[R][V], const Q* q, int64_t q_stride, const bf16* const (&k)[V],
                          int64_t offset) {
    vu b[V];
    UNROLL for (int j = 0; j < V; j++) b[j] = load_pairs<N>(k[j] + offset);
#if defined(__AVX512BF16__)
    UNROLL for (int i = 0; i < R; i++) {
      __m512bh a = (__m512bh)_mm512_set1_epi32(load_raw<int>(q + i * q_stride));
      UNROLL for (int j = 0; j < V; j++)
        acc[i][j] = (vf)_mm512_dpbf16_ps((__m512)acc[i][j], a, (__m512bh)b[j]);
    }
#else
    UNROLL for (int odd = 0; odd < 2; odd++)
      UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < V; j++)
          acc[i][j] = fma(q[i * q_stride + odd],
                          (vf)(odd ? b[j] & 0xffff0000u : b[j] << 16), acc[i][j]);
#endif
  }
};

constexpr int kScoreRows = W == 16 ? 6 : 2;  // rows and key vectors at once: the registers again
constexpr int kScoreVectors = 4;
constexpr int kValueRows = 4;
constexpr int kValueVectors = W == 16 ? 4 : 2;

// scores[R][...] = q . k for V vectors of N keys
template <class T, int N, int R>
NOINLINE void score_kernel(const typename Keys<T>::Q* q, int64_t q_stride, const T* const* keys,
                  int64_t block_size, int64_t head_size, float* scores) {
  constexpr int V = kScoreVectors;
  const T* k[V];
  UNROLL for (int j = 0; j < V; j++) k[j] = keys[j];
  vf acc[R][V] = {};
  for (int64_t d = 0; d < head_size; d += Keys<T>::kDims)
    Keys<T>::template step<N, R, V>(acc, q + d, q_stride, k, d * block_size);
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) store(scores + i * kTile + j * N, acc[i][j], N);
}

template <class T, int N, int R>
INLINE void score_kernels(int rows, const typename Keys<T>::Q* q, int64_t q_stride,
                          const T* const* keys, int64_t block_size, int64_t head_size,
                          float* scores) {
  if (rows == R) return score_kernel<T, N, R>(q, q_stride, keys, block_size, head_size, scores);
  if constexpr (R > 1)
    score_kernels<T, N, R - 1>(rows, q, q_stride, keys, block_size, head_size, scores);
}

// acc[R][dims] += p[R][first..last) * v[first..last)[dims], V vectors of dims, the last of `tail`
// lanes. `values` has a pointer for each position of the tile.
template <class T, int R, int V>
NOINLINE void value_kernel(const float* p, const T* const* values, int first, int last, int64_t dim, int tail,
                  float* acc, int64_t acc_stride) {
  vf sum[R][V];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) sum[i][j] = load(acc + i * acc_stride + dim + j * W);
  for (int key = first; key < last; key++) {
    vf v[V];
    UNROLL for (int j = 0; j < V - 1; j++) v[j] = load(values[key] + dim + j * W);
    v[V - 1] = load(values[key] + dim + (V - 1) * W, tail);
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < V; j++) sum[i][j] = fma(p[i * kTile + key], v[j], sum[i][j]);
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) store(acc + i * acc_stride + dim + j * W, sum[i][j]);
}

template <class T, int R>
void add_values(const float* p, const T* const* values, int first, int last, int64_t head_size,
                float* acc, int64_t acc_stride) {
  int64_t d = 0;
  for (; d + kValueVectors * W <= head_size; d += kValueVectors * W)
    value_kernel<T, R, kValueVectors>(p, values, first, last, d, W, acc, acc_stride);
  for (; d + W <= head_size; d += W)
    value_kernel<T, R, 1>(p, values, first, last, d, W, acc, acc_stride);
  if (d < head_size)  // head sizes are multiples of 8
    value_kernel<T, R, 1>(p, values, first, last, d, W / 2, acc, acc_stride);
}

struct Row {
  int64_t token;
  int first, last;  // what it sees of the current tile
  int64_t position;
  float slope;
  float max, sum;
};

template <class T>
struct Attention {
  using Q = typename Keys<T>::Q;
  const AttentionArgs& a;
  const int64_t group, acc_stride, kv_block, kv_head_size;

  explicit Attention(const AttentionArgs& args)
      : a(args),
        group(a.heads / a.kv_heads),
        acc_stride(ceil_div(a.head_size, W) * W),
        kv_block(2 * a.kv_heads * a.block_size * a.head_size),
        kv_head_size(a.block_size * a.head_size) {}

  // Rows [first_row, first_row + count) of the request's query_len * group rows for one KV head.
  void run(int64_t request, int64_t kv_head, int64_t first_row, int count) const {
    alignas(64) Q query[kTileRows * kMaxHeadSize];
    alignas(64) float acc[kTileRows * kMaxHeadSize];
    alignas(64) float scores[kTileRows * kTile];
    Row rows[kTileRows];
    const int64_t start = a.query_start_loc[request];
    const int64_t query_len = a.query_start_loc[request + 1] - start;
    const int64_t position0 = a.seq_lens[request] - query_len;
    for (int i = 0; i < count; i++) {
      const int64_t token = (first_row + i) / group, head = head_of(kv_head, first_row + i);
      rows[i] = {start + token, 0, 0, position0 + token,
                 a.alibi_slopes ? a.alibi_slopes[head] : 0.0f, -INFINITY, 0.0f};
      const T* q = static_cast<const T*>(a.query) + rows[i].token * a.query_stride +
                   head * a.query_head_stride;
      if constexpr (std::is_same_v<Q, T>)
        memcpy(query + i * a.head_size, q, a.head_size * sizeof(T));
      else
        for_lanes(a.head_size,
                  [&](int64_t d, int n) { store(query + i * a.head_size + d, load(q + d, n), n); });
      memset(acc + i * acc_stride, 0, acc_stride * sizeof(float));
    }
    const int64_t begin = a.window ? max<int64_t>(0, rows[0].position - a.window + 1) : 0;
    const int64_t end = rows[count - 1].position + 1;
    for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile)
      walk_tile(request, kv_head, tile, max(begin, tile), min(end, tile + kTile), query, rows, count,
                scores, acc);
    for (int i = 0; i < count; i++) {
      T* out = static_cast<T*>(a.out) + rows[i].token * a.out_stride +
               head_of(kv_head, first_row + i) * a.out_head_stride;
      const float* from = acc + i * acc_stride;
      for_lanes(a.head_size,
                [&](int64_t d, int n) { store(out + d, load(from + d) / rows[i].sum, n); });
    }
  }

  int64_t head_of(int64_t kv_head, int64_t row) const { return kv_head * group + row % group; }

  // Positions [begin, end) of a tile: all that any of the rows sees there.
  void walk_tile(int64_t request, int64_t kv_head, int64_t tile, int64_t begin, int64_t end,
                 const Q* query, Row* rows, int count, float* scores, float* acc) const {
    const int32_t* blocks = a.block_table + request * a.block_table_stride;
    const int lanes_of_keys = int(min<int64_t>(W, a.block_size));
    const T* keys[kTile / 4];
    const T* values[kTile];
    for (int64_t i = 0; i < kTile; i += lanes_of_keys) {
      // Blocks that no row sees may not exist: their place is taken by one that does.
      const int64_t position = min(max(tile + i, begin), end - 1);
      const int64_t offset = (tile + i) % a.block_size;
      const T* block = static_cast<const T*>(a.kv_cache) +
                       blocks[position / a.block_size] * kv_block + kv_head * kv_head_size;
      keys[i / lanes_of_keys] = block + offset * Keys<T>::kDims;
      for (int64_t j = 0; j < lanes_of_keys; j++)
        values[i + j] = block + a.kv_heads * kv_head_size + (offset + j) * a.head_size;
    }
    for (int v = 0; v < kTile / lanes_of_keys; v += kScoreVectors) {
      const int64_t at = tile + v * lanes_of_keys;
      if (at >= end || at + kScoreVectors * lanes_of_keys <= begin) continue;
      for (int i = 0; i < count; i += kScoreRows) {
        const Q* q = query + i * a.head_size;
        float* s = scores + i * kTile + v * lanes_of_keys;
        const int n = min(kScoreRows, count - i);
        if (W <= 8 || lanes_of_keys == W)
          score_kernels<T, W, kScoreRows>(n, q, a.head_size, keys + v, a.block_size, a.head_size, s);
        else if constexpr (W > 8)
          score_kernels<T, W / 2, kScoreRows>(n, q, a.head_size, keys + v, a.block_size, a.head_size,
                                              s);
      }
    }
    for (int i = 0; i < count; i++) {
      Row& row = rows[i];
      const int64_t from = a.window ? row.position - a.window + 1 : 0;
      row.first = int(min<int64_t>(max(from - tile, int64_t(0)), kTile));
      row.last = int(min<int64_t>(max(row.position + 1 - tile, int64_t(0)), kTile));
      if (row.first < row.last) softmax_step(row, tile, scores + i * kTile, acc + i * acc_stride);
    }
    for (int i = 0; i < count;) {
      if (count - i >= kValueRows &&
          share_values(rows + i, scores + i * kTile, values, acc + i * acc_stride)) {
        i += kValueRows;
      } else {
        add_values<T, 1>(scores + i * kTile, values, rows[i].first, rows[i].last, a.head_size,
                         acc + i * acc_stride, acc_stride);
        i++;
      }
    }
  }

  // scores -> probabilities relative to the new maximum; what was summed before is rescaled.
  void softmax_step(Row& row, int64_t tile, float* s, float* acc) const {
    vf m = splat(row.max);
    for (int i = 0; i < kTile; i += W) {
      vf v = load(s + i) * a.scale;
      if (a.soft_cap != 0.0f) v = soft_cap(v, a.soft_cap);
      const vf key = lanes() + float(i);
      if (a.alibi_slopes) v = fma(row.slope, key + float(tile - row.position), v);
      v = key >= float(row.first) ? v : splat(-INFINITY);
      v = key < float(row.last) ? v : splat(-INFINITY);
      store(s + i, v);
      m = vmax(v, m);
    }
    const float new_max = reduce_max(m);
    vf sum{};
    for (int i = 0; i < kTile; i += W) {
      const vf p = exp(load(s + i) - new_max);
      store(s + i, p);
      sum += p;
    }
    const float old = exp(splat(row.max - new_max))[0];
    row.sum = row.sum * old + reduce_sum(sum);
    row.max = new_max;
    if (old != 1.0f)
      for (int64_t d = 0; d < acc_stride; d += W) store(acc + d, load(acc + d) * old);
  }

  // Adds the values for kValueRows rows together where they see the same positions, one by one elsewhere.
  // Every row still adds its own positions only, in ascending order. False: nothing to share.
  bool share_values(const Row* rows, const float* p, const T* const* values, float* acc) const {
    constexpr int R = kValueRows;
    int first = 0, last = kTile;
    for (int i = 0; i < R; i++) first = max(first, rows[i].first), last = min(last, rows[i].last);
    if (first >= last) return false;
    auto alone = [&](int i, int from, int to) {
      if (from < to)
        add_values<T, 1>(p + i * kTile, values, from, to, a.head_size, acc + i * acc_stride,
                         acc_stride);
    };
    for (int i = 0; i < R; i++) alone(i, rows[i].first, first);
    add_values<T, R>(p, values, first, last, a.head_size, acc, acc_stride);
    for (int i = 0; i < R; i++) alone(i, last, rows[i].last);
    return true;
  }
};

void attention(const AttentionArgs& a) {
  const int64_t tokens = a.query_start_loc[a.num_reqs], group = a.heads / a.kv_heads;
  if (tokens == 0) return;
  // Small batches: smaller tasks, so that every thread has one.
  int64_t tile_rows = kTileRows;
  while (tile_rows > 1 && tokens * a.heads / tile_rows < 2 * num_threads()) tile_rows /= 2;
  // Tasks of request r: [first[r], first[r + 1]), each (tile of rows, KV head)
  int64_t* first = static_cast<int64_t*>(scratch((a.num_reqs + 1) * sizeof(int64_t)));
  int64_t cost = 0;
  first[0] = 0;
  for (int64_t r = 0; r < a.num_reqs; r++) {
    const int64_t rows = (a.query_start_loc[r + 1] - a.query_start_loc[r]) * group;
    first[r + 1] = first[r] + ceil_div(rows, tile_rows) * a.kv_heads;
    cost += rows * a.seq_lens[r];
  }
  const int64_t tasks = first[a.num_reqs];
  parallel_for(tasks, cost * a.kv_heads * a.head_size / W, [&](int64_t i) {
    const int64_t task = tasks - 1 - i;  // the last tiles of a prompt see most: they begin
    int64_t low = 0, high = a.num_reqs;  // the request with first[low] <= task < first[low + 1]
    while (high - low > 1) (first[(low + high) / 2] <= task ? low : high) = (low + high) / 2;
    const int64_t tile = (task - first[low]) / a.kv_heads, kv_head = (task - first[low]) % a.kv_heads;
    const int64_t rows = (a.query_start_loc[low + 1] - a.query_start_loc[low]) * group;
    const int count = int(min(tile_rows, rows - tile * tile_rows));
    with_type(a.dtype, [&](auto t) {
      Attention<decltype(t)>(a).run(low, kv_head, tile * tile_rows, count);
    });
  });
}

template <class T>
INLINE void write_kv_typed(const WriteKvArgs& a, T) {
  constexpr int dims = Keys<T>::kDims;
  const int64_t head_size = a.block_size * a.head_size;
  parallel_for(a.tokens, a.tokens * a.kv_heads * a.head_size, [&](int64_t token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const int64_t offset = slot % a.block_size;
    T* block = static_cast<T*>(a.kv_cache) + slot / a.block_size * 2 * a.kv_heads * head_size;
    for (int64_t h = 0; h < a.kv_heads; h++) {
      const T* key = static_cast<const T*>(a.key) + token * a.key_stride + h * a.key_head_stride;
      const T* value =
          static_cast<const T*>(a.value) + token * a.value_stride + h * a.value_head_stride;
      T* keys = block + h * head_size + offset * dims;
      for (int64_t d = 0; d < a.head_size; d += dims)
        memcpy(keys + d * a.block_size, key + d, dims * sizeof(T));
      memcpy(block + (a.kv_heads + h) * head_size + offset * a.head_size, value,
             a.head_size * sizeof(T));
    }
  });
}

void write_kv(const WriteKvArgs& a) {
  with_type(a.dtype, [&](auto t) { write_kv_typed(a, t); });
}

OCTAVO_END
