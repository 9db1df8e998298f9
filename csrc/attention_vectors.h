// The two products of attention on vectors: of queries with keys, and of probabilities with values.
// attention_tiles.h has them on tile registers.
#pragma once
#include "attention_tiles.h"
#include "vmath.h"

OCTAVO_BEGIN

// Numbers of positions and rows of type T that are processed together.
template <class T>
struct Extent {
  // Key positions of a softmax step; a multiple of every block size, or divides it. More of them
  // load and store the sums less often; their logits need W = 16 to fit into the registers.
  static constexpr int kTile = kOnTiles<T> ? kPositionsOnTiles : W == 16 ? 256 : 64;
  // Rows that share the tiles: full sets of 6 and of 4.
  static constexpr int kTileRows = kOnTiles<T> ? kRowsOnTiles : 36;
  // Rows that share a softmax step.
  static constexpr int kStepRows = kOnTiles<T> ? kStepRowsOnTiles : kTileRows;
  // Rows up to which reading the cache takes longer than computing.
  static constexpr int kFewRows = kOnTiles<T> ? kStepRowsOnTiles : 12;
};
constexpr int kFetchedEarly = 32;  // positions of a tile whose values are fetched during the softmax

// Multiplication of keys of storage type T by a query. `Q`: type that the query is read as;
// `kDims`: dimensions of a step; `N`: keys in a vector, W or, for blocks smaller than W, half of
// it.
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

// Adds a dimension of N keys that is stored alone.
template <int N, int R, int V, class Q>
INLINE void add_dimension(vf (&acc)[R][V], const Q* q, int64_t q_stride, const bf16* const (&k)[V]) {
  UNROLL for (int j = 0; j < V; j++) {
    const vf key = load(k[j], N);
    UNROLL for (int i = 0; i < R; i++)
      acc[i][j] = fma(load(q + i * q_stride, 1)[0], key, acc[i][j]);
  }
}

template <int N>
INLINE vu load_pairs(const bf16* p) {
  vu v{};
  memcpy(&v, p, 4 * N);
  return v;
}

template <>
struct Keys<bf16> {
  static constexpr int kDims = 2;
#if defined(OCTAVO_DOT_BF16)
  using Q = bf16;
#else
  using Q = float;
#endif
  template <int N, int R, int V>
  static INLINE void step(vf (&acc)[R][V], const Q* q, int64_t q_stride, const bf16* const (&k)[V],
                          int64_t offset) {
    vu b[V];
    UNROLL for (int j = 0; j < V; j++) b[j] = load_pairs<N>(k[j] + offset);
#if defined(OCTAVO_DOT_BF16)
    UNROLL for (int i = 0; i < R; i++) {
      const vu a = (vu)splat_int(load_raw<int>(q + i * q_stride));
      UNROLL for (int j = 0; j < V; j++) acc[i][j] = dot_bf16(acc[i][j], a, b[j]);
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

constexpr int kScoreRows = kRegisters == 32 ? 6 : 2;  // rows and key vectors at once: limited by registers
constexpr int kScoreVectors = 4;
// scores[R][...] = q . k for V vectors of N keys, the first one at position `at` of its block or,
// modulo block_size, after it. `next`: the following keys, to be prefetched meanwhile, or null.
template <class T, int N, int R, int V>
NOINLINE void score_kernel(const typename Keys<T>::Q* q, int64_t q_stride, const T* const* keys,
                           const T* const* next, int64_t at, int64_t block_size, int64_t head_size,
                           float* scores) {
  constexpr int dims = Keys<T>::kDims;
  const T *k[V], *ahead[V];
  UNROLL for (int j = 0; j < V; j++) k[j] = keys[j], ahead[j] = next ? next[j] : nullptr;
  vf acc[R][V] = {};
  for (int64_t d = 0; d + dims <= head_size; d += dims) {
    Keys<T>::template step<N, R, V>(acc, q + d, q_stride, k, d * block_size);
    if (next)
      UNROLL for (int j = 0; j < V; j++) __builtin_prefetch(ahead[j] + d * block_size);
  }
  if constexpr (dims == 2)
    if (head_size % 2) {
      const int64_t d = head_size - 1;  // keys are one element apart there, not two
      UNROLL for (int j = 0; j < V; j++) k[j] += d * block_size - (at + j * N) % block_size;
      add_dimension<N>(acc, q + d, q_stride, k);
    }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) store(scores + i * Extent<T>::kTile + j * N, acc[i][j], N);
}

template <class T, int N, int R, int V>
INLINE void score_kernels(int rows, const typename Keys<T>::Q* q, int64_t q_stride,
                          const T* const* keys, const T* const* next, int64_t at,
                          int64_t block_size, int64_t head_size, float* scores) {
  if (rows == R)
    return score_kernel<T, N, R, V>(q, q_stride, keys, next, at, block_size, head_size, scores);
  if constexpr (R > 1)
    score_kernels<T, N, R - 1, V>(rows, q, q_stride, keys, next, at, block_size, head_size, scores);
}

// Computes and stores probabilities of type P: 2^x for x up to about 0, and a store of two vectors.
template <class P>
INLINE vf power_of_two(vf x) {
  return exp2_or_zero(x);
}
template <class P>
INLINE void keep(P* p, vf low, vf high) {
  store(p, low), store(p + W, high);
}
#if defined(__AVX512BF16__)
// Error within 3e-6, a hundredth of the rounding to bfloat16
template <>
INLINE vf power_of_two<bf16>(vf x) {
  return exp2_or_zero(x, {1.0f, 6.931241751e-01f, 2.402409911e-01f, 5.590642616e-02f, 9.582852945e-03f});
}
template <>
INLINE void keep(bf16* p, vf low, vf high) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

// Sum of values of storage type T. `P`: type of the probabilities; `kStep`: positions of a step;
// `kRows`: rows at once; `kDims`: dimensions of an accumulator; a vector holds W.
template <class T>
struct Values {
  using P = float;
  static constexpr int kStep = 1, kRows = kRegisters == 32 ? 6 : 4;
  static constexpr int kVectors = kRegisters == 32 ? 4 : 2;

  // acc[R][dims] += p[R][first..last) * v[first..last)[dims], V vectors, the last of `tail` lanes.
  // `next`: the following values, to be prefetched meanwhile, or null.
  template <int R, int V>
  static NOINLINE void kernel(const P* p, const T* const* values, const T* const* next, int first,
                              int last, int64_t dim, int tail, float* acc, int64_t stride) {
    vf sum[R][V];
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < V; j++) sum[i][j] = load(acc + i * stride + dim + j * W);
    for (int key = first; key < last; key++) {
      vf v[V];
      UNROLL for (int j = 0; j < V - 1; j++) v[j] = load(values[key] + dim + j * W);
      v[V - 1] = load(values[key] + dim + (V - 1) * W, tail);
      UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < V; j++)
          sum[i][j] = fma(p[i * Extent<T>::kTile + key], v[j], sum[i][j]);
      if (next && key >= kFetchedEarly)
        UNROLL for (int j = 0; j < V; j++) __builtin_prefetch(next[key] + dim + j * W);
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < V; j++) store(acc + i * stride + dim + j * W, sum[i][j]);
  }

  template <int R>
  static INLINE void add(const P* p, const T* const* values, const T* const* next, int first,
                         int last, int64_t head_size, float* acc, int64_t stride) {
    int64_t d = 0;
    for (; d + kVectors * W <= head_size; d += kVectors * W)
      kernel<R, kVectors>(p, values, next, first, last, d, W, acc, stride);
    if constexpr (kVectors > 2)
      for (; d + 2 * W <= head_size; d += 2 * W)
        kernel<R, 2>(p, values, next, first, last, d, W, acc, stride);
    for (; d < head_size; d += W) {
      const int tail = int(min<int64_t>(W, head_size - d));
      kernel<R, 1>(p, values, next, first, last, d, tail, acc, stride);
    }
  }

  // Adds positions [first, last) of one row.
  static void add_row(const P* p, const T* const* values, int first, int last, int64_t head_size,
                      float* acc, int64_t stride) {
    if (first < last) add<1>(p, values, nullptr, first, last, head_size, acc, stride);
  }

  static void write(const float* acc, float sum, T* out, int64_t head_size) {
    for_lanes(head_size, [&](int64_t d, int n) { store(out + d, load(acc + d) / sum, n); });
  }
};

#if defined(__AVX512BF16__)
// One dot product sums two positions: two rows of values are paired as they are read. The result is
// two vectors with alternating groups of four of 32 dimensions, until it is written.
template <>
struct Values<bf16> {
  using P = bf16;
  static constexpr int kStep = 2, kRows = 6, kChunk = 32;

  struct Pair {
    __m512bh low, high;
  };
  static INLINE Pair pair(__m512i a, __m512i b) {
    return {(__m512bh)_mm512_unpacklo_epi16(a, b), (__m512bh)_mm512_unpackhi_epi16(a, b)};
  }
  static INLINE __m512i row(const bf16* v, __mmask32 lanes) {
    return _mm512_maskz_loadu_epi16(lanes, v);
  }
  static INLINE __mmask32 lanes_of(int64_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }

  // Adds positions [first, last), both even, for C chunks of 32 dimensions.
  template <int R, int C>
  static NOINLINE void kernel(const P* p, const bf16* const* values, const bf16* const* next,
                              int first, int last, int64_t dim, __mmask32 tail, float* acc,
                              int64_t stride) {
    __m512 sum[R][2 * C];
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < 2 * C; j++)
        sum[i][j] = _mm512_loadu_ps(acc + i * stride + dim + j * W);
    for (int key = first; key < last; key += 2) {
      Pair v[C];
      UNROLL for (int c = 0; c < C; c++) {
        const __mmask32 lanes = c == C - 1 ? tail : ~0u;
        v[c] = pair(row(values[key] + dim + c * kChunk, lanes),
                    row(values[key + 1] + dim + c * kChunk, lanes));
        if (next && key >= kFetchedEarly) {
          __builtin_prefetch(next[key] + dim + c * kChunk);
          __builtin_prefetch(next[key + 1] + dim + c * kChunk);
        }
      }
      UNROLL for (int i = 0; i < R; i++) {
        const P* at = p + i * Extent<bf16>::kTile + key;
        const __m512bh both = (__m512bh)_mm512_set1_epi32(load_raw<int>(at));
        UNROLL for (int c = 0; c < C; c++) {
          sum[i][2 * c] = _mm512_dpbf16_ps(sum[i][2 * c], v[c].low, both);
          sum[i][2 * c + 1] = _mm512_dpbf16_ps(sum[i][2 * c + 1], v[c].high, both);
        }
      }
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < 2 * C; j++)
        _mm512_storeu_ps(acc + i * stride + dim + j * W, sum[i][j]);
  }

  template <int R>
  static INLINE void add(const P* p, const bf16* const* values, const bf16* const* next,
                         int first, int last, int64_t head_size, float* acc, int64_t stride) {
    int64_t d = 0;
    for (; d + 2 * kChunk <= head_size; d += 2 * kChunk)
      kernel<R, 2>(p, values, next, first, last, d, ~0u, acc, stride);
    for (; d < head_size; d += kChunk)
      kernel<R, 1>(p, values, next, first, last, d, lanes_of(head_size - d), acc, stride);
  }

  // Adds a pair with one visible position: the other one may hold anything and is not read.
  static void add_half(const P* p, const bf16* value, int key, int64_t head_size, float* acc) {
    const __m512bh both =
        (__m512bh)_mm512_set1_epi32(load_raw<int>(p + key / kStep * kStep));
    for (int64_t d = 0; d < head_size; d += kChunk) {
      const __m512i v = row(value + d, lanes_of(head_size - d)), none = _mm512_setzero_si512();
      const Pair halves = key % 2 ? pair(none, v) : pair(v, none);
      _mm512_storeu_ps(acc + d, _mm512_dpbf16_ps(_mm512_loadu_ps(acc + d), halves.low, both));
      _mm512_storeu_ps(acc + d + W,
                       _mm512_dpbf16_ps(_mm512_loadu_ps(acc + d + W), halves.high, both));
    }
  }

  static void add_row(const P* p, const bf16* const* values, int first, int last,
                      int64_t head_size, float* acc, int64_t stride) {
    if (first >= last) return;
    if (first % 2) add_half(p, values[first], first, head_size, acc), first++;
    const int even = last / 2 * 2;
    if (first < even) add<1>(p, values, nullptr, first, even, head_size, acc, stride);
    if (even < last && first <= even) add_half(p, values[even], even, head_size, acc);
  }

  static void write(const float* acc, float sum, bf16* out, int64_t head_size) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 total = _mm512_set1_ps(sum);
    for (int64_t d = 0; d < head_size; d += kChunk) {
      const __m512 low = _mm512_div_ps(_mm512_loadu_ps(acc + d), total);
      const __m512 high = _mm512_div_ps(_mm512_loadu_ps(acc + d + W), total);
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(low, second, high),
                                                _mm512_permutex2var_ps(low, first, high));
      _mm512_mask_storeu_epi16(out + d, lanes_of(head_size - d), (__m512i)both);
    }
  }
};
#endif

// Transposes rows [first, last) of `size` numbers: to[size / dims][positions][dims], the last
// dimension of an odd number alone.
template <class T>
NOINLINE void transpose_rows(const T* const* rows, int first, int last, int64_t size,
                             int64_t positions, T* to) {
  constexpr int dims = Keys<T>::kDims;
  const int64_t steps = size / dims;
  for (int at = first / W * W; at < last; at += W) {
    auto seen = [=](int i) { return at + i >= first && at + i < last; };
    if constexpr (dims * sizeof(T) == sizeof(float)) {
      for (int64_t d = 0; d < steps; d += W) {
        const int64_t some = min<int64_t>(W, steps - d);
        vu v[W] = {};
        UNROLL for (int i = 0; i < W; i++)
          if (seen(i)) memcpy(&v[i], rows[at + i] + d * dims, some * sizeof(float));
        transpose(v);
        for (int i = 0; i < some; i++) memcpy(to + ((d + i) * positions + at) * dims, &v[i], sizeof v[i]);
      }
    } else {
      for (int i = 0; i < W; i++)
        if (seen(i))
          for (int64_t d = 0; d < size; d++) to[d * positions + at + i] = rows[at + i][d];
    }
    for (int i = 0; dims == 2 && size % 2 && i < W; i++)
      to[(size - 1) * positions + at + i] = seen(i) ? rows[at + i][size - 1] : T{};
  }
}

OCTAVO_END
