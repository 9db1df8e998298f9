// Products of bytes: codes of weights, unsigned, and rows of x that are quantized to signed bytes.
#pragma once
#include "gemm.h"

OCTAVO_BEGIN

constexpr int kQuad = 4;  // codes in a lane
#if defined(__AVX512VNNI__) || (defined(OCTAVO_NEON) && defined(__ARM_FEATURE_DOTPROD))
constexpr int kQuantRows8 = 6, kQuantRows4 = 6;  // rows at once, limited by registers
#elif defined(__AVX512F__) || defined(OCTAVO_NEON)
constexpr int kQuantRows8 = 4, kQuantRows4 = 4;
#elif defined(__AVX2__)
constexpr int kQuantRows8 = 4, kQuantRows4 = 4;
#else
constexpr int kQuantRows8 = 2, kQuantRows4 = 2;
#endif
constexpr int kAccumulators8 = kRegisters == 32 ? 24 : 8;
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define OCTAVO_PAIR_SUMS  // products of bytes are made in pairs, which are summed in 16 bits
#define OCTAVO_SIGNED_CODES
#endif
#if defined(OCTAVO_SIGNED_CODES)
constexpr int kCodeOffset = 128;  // decode() subtracts it from int8 and int4_levels to make them signed
#else
constexpr int kCodeOffset = 0;
#endif
constexpr int64_t kQuantChunk = 4 * kRowBlock;  // rows of x quantized together
constexpr float kTiny = 1e-35f;  // smaller numbers count as zero: their inverse would overflow
constexpr int kAhead = 4096;  // prefetch distance in bytes, for few rows

typedef int8_t vb __attribute__((vector_size(W)));

INLINE vf to_float(vi v) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps((__m512i)v);
#else
  return __builtin_convertvector(v, vf);
#endif
}

// Rounds to the nearest integer, ties to even, for magnitudes below 2^22.
INLINE vi round_to_int(vf v) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the last bit of a sum with it has the value 1
  return (vi)(v + magic) - (vi)magic;
}

INLINE vb to_bytes(vi v) {
#if defined(__AVX512F__)
  return (vb)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, vb);
#endif
}

INLINE vi load_zeros(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(load_raw<__m128i>(p));
#else
  typedef uint8_t vub __attribute__((vector_size(W)));
  return __builtin_convertvector(load_raw<vub>(p), vi);
#endif
}

// a * b for 0 <= a < 2^15 and b of 16 bits
INLINE vi multiply_small(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return a * b;
#endif
}

typedef int16_t vs __attribute__((vector_size(4 * W)));

#if defined(OCTAVO_PAIR_SUMS)
// Products of two unsigned bytes and two signed bytes, summed, in each half of a lane
INLINE vs pair_products(vu codes, vi x) {
#if defined(__AVX512F__)
  return (vs)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#else
  return (vs)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#endif
}

// acc + both halves of each lane
INLINE vi add_pairs(vi acc, vs pairs) {
  const vs ones = (vs)splat_int(0x00010001);
#if defined(__AVX512F__)
  return acc + (vi)_mm512_madd_epi16((__m512i)pairs, (__m512i)ones);
#else
  return acc + (vi)_mm256_madd_epi16((__m256i)pairs, (__m256i)ones);
#endif
}
#endif

// acc + the products of four decoded codes (bytes, signed if kCodeOffset) and four signed bytes in
// each lane; no byte of x is -128
INLINE vi dot(vi acc, vu codes, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)x);
#elif defined(OCTAVO_PAIR_SUMS)
  // A sign moves to x: two products are 2 * 128 * 127 at most, which 16 bits hold.
#if defined(__AVX512F__)
  const __m512i c = (__m512i)codes, v = (__m512i)x;
  const __m512i turned = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(c), __m512i{}, v);
  return add_pairs(acc, pair_products((vu)_mm512_abs_epi8(c), (vi)turned));
#else
  const __m256i c = (__m256i)codes;
  return add_pairs(acc, pair_products((vu)_mm256_abs_epi8(c), (vi)_mm256_sign_epi8((__m256i)x, c)));
#endif
#elif defined(OCTAVO_NEON)
  return neon_dot(acc, codes, x);
#else
  UNROLL for (int i = 0; i < kQuad; i++)
    acc = (vi)((vu)acc + ((codes >> (8 * i)) & 0xffu) * (vu)((x << (24 - 8 * i)) >> 24));
  return acc;
#endif
}

// acc[R][V] += the products of successive quads. `codes(quad, j)` returns the decoded codes of
// vector j, x has the quads of R rows. Codes are at most Most, or signed if Most is 128.
template <int Quads, int Most, int R, int V, class Codes>
INLINE void dots(vi (&acc)[R][V], const int8_t* x, int64_t stride, Codes codes) {
#if defined(OCTAVO_PAIR_SUMS)
  // Quads whose sums 16 bits hold: a divisor of Quads, which is 1, 2, 4 or 8
  constexpr int fit = 32767 / (2 * 127 * Most);
  constexpr int power = fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  constexpr int depth = power < Quads ? power : Quads;
  if constexpr (Most < 128) {
    UNROLL for (int first = 0; first < Quads; first += depth) {
      vs pairs[R][V];
      UNROLL for (int d = 0; d < depth; d++) {
        const int q = first + d;
        vu b[V];
        UNROLL for (int j = 0; j < V; j++) b[j] = codes(q, j);
        UNROLL for (int i = 0; i < R; i++) {
          const vi s = splat_int(load_raw<int32_t>(x + i * stride + q * kQuad));
          UNROLL for (int j = 0; j < V; j++) {
            const vs more = pair_products(b[j], s);
            pairs[i][j] = d == 0 ? more : pairs[i][j] + more;
          }
        }
      }
      UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < V; j++) acc[i][j] = add_pairs(acc[i][j], pairs[i][j]);
    }
    return;
  }
#endif
  UNROLL for (int q = 0; q < Quads; q++) {
    vu b[V];
    UNROLL for (int j = 0; j < V; j++) b[j] = codes(q, j);
    UNROLL for (int i = 0; i < R; i++) {
      const vi s = splat_int(load_raw<int32_t>(x + i * stride + q * kQuad));
      UNROLL for (int j = 0; j < V; j++) acc[i][j] = dot(acc[i][j], b[j], s);
    }
  }
}

INLINE int32_t reduce_sum(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t lanes[W], sum = 0;
  memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < W; i++) sum += lanes[i];
  return sum;
#endif
}
INLINE int32_t reduce_max(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t lanes[W];
  memcpy(lanes, &v, sizeof lanes);
  for (int i = 1; i < W; i++) lanes[0] = max(lanes[0], lanes[i]);
  return lanes[0];
#endif
}

// Returns the largest magnitude; NaN if any number is NaN.
template <class T>
INLINE float largest(const T* x, int64_t count) {
  vi most = {};  // as bits, where NaN is above infinity
  for (int64_t k = 0; k < count; k += W) {
    vi v = (vi)load(x + k, int(min<int64_t>(W, count - k))) & 0x7fffffff;
    most = v > most ? v : most;
  }
  const int32_t top = reduce_max(most);
  return load_raw<float>(&top);
}

INLINE float inverse_scale(float most) { return most < kTiny ? 0.0f : 127.0f / most; }
INLINE float byte_scale(float most) { return most < kTiny ? 0.0f : most / 127.0f; }

// Second terms of x: a group with a large number has a large scale, and so large rounding errors.
// These errors are quantized, too. Few groups of a row need a second term.
constexpr float kOutlier = 4;  // least ratio of a group's largest number, squared, to the mean of these squares
constexpr float kFiner = 254;  // a scale over that of its second term, since errors are up to 1/2

// Set of the groups of each row that have second terms
struct Outliers {
  uint64_t* bits;  // [rows][words]
  int64_t words;

  // Marks groups of a row, whose largest magnitudes are `most`. Sums are in order, for equal bits.
  INLINE void mark(int64_t row, const float* most, int64_t groups) const {
    float total = 0;
    for (int64_t g = 0; g < groups; g++) total += most[g] * most[g];
    const float bound = kOutlier * (total / float(groups));
    memset(bits + row * words, 0, words * sizeof *bits);
    for (int64_t g = 0; g < groups; g++)
      bits[row * words + g / 64] |= uint64_t(most[g] * most[g] > bound) << (g % 64);
  }
  INLINE bool marked(int64_t row, int64_t group) const {
    return bits[row * words + group / 64] >> (group % 64) & 1;
  }
  // Lists the groups that are marked in any of some rows, in order, and calls f(count) for up to 64.
  template <class F>
  INLINE void for_each(int64_t row, int64_t rows, int32_t (&list)[64], F f) const {
    for (int64_t w = 0; w < words; w++) {
      uint64_t any = 0;
      for (int64_t i = row; i < row + rows; i++) any |= bits[i * words + w];
      int64_t count = 0;
      for (; any; any &= any - 1) list[count++] = int32_t(w * 64 + __builtin_ctzll(any));
      if (count) f(count);
    }
  }
};

typedef uint8_t vbytes __attribute__((vector_size(4 * W)));

// Returns entries of a table of 16 bytes, which t repeats, for codes, one per byte.
INLINE vu look_up(vbytes t, vu codes) {
#if defined(__AVX512F__)
  return (vu)_mm512_shuffle_epi8((__m512i)t, (__m512i)codes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8((__m256i)t, (__m256i)codes);
#elif defined(OCTAVO_NEON)
  return neon_lookup((vu)t, codes);
#else
  return (vu)__builtin_shuffle(t, (vbytes)codes);
#endif
}

// Levels + zero, once for each 16 bytes of a vector
struct LevelBytes {
  uint8_t bytes[4 * W];
  constexpr LevelBytes(const int8_t (&levels)[16], int zero = 128 - kCodeOffset) : bytes() {
    for (int i = 0; i < 4 * W; i++) bytes[i] = uint8_t(levels[i % 16] + zero);
  }
};

// Place of a number of a row and a group if rows of x are tiled: [rows / 16][groups][16]
INLINE int64_t in_sixteens(int64_t row, int64_t group, int64_t groups) {
  return (row / 16 * groups + group) * 16 + row % 16;
}

// Calls f(first, rows) for the rows row0 ... row0 + rows of a weight, cut at the panels.
template <class F>
INLINE void for_panels(int64_t row0, int64_t rows, int64_t cost, F f) {
  const int64_t end = row0 + rows, first = row0 / kPanel;
  parallel_for(ceil_div(end, kPanel) - first, cost, [&](int64_t i) {
    const int64_t from = max((first + i) * kPanel, row0);
    f(from, min((first + i + 1) * kPanel, end) - from);
  });
}

OCTAVO_END
