// Vectors of W float32 lanes for the target instruction set, by the vector extensions of GCC and
// Clang; intrinsics only for operations that those lack.
//
// The order of operations is guaranteed: the build turns off contraction (-ffp-contract=off), so a
// multiply and an add become one instruction only in fma(), alike in every loop and in every tail.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

// All names below are local to one variant: the linker must not use code compiled for AVX-512 for a
// lesser processor. For the same reason the kernels use no templates of the standard library.
#define OCTAVO_BEGIN           \
  namespace octavo {           \
  namespace OCTAVO_ISA {       \
  namespace {
#define OCTAVO_END \
  }                \
  }                \
  }
#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#if defined(OCTAVO_EMULATED_TILES)
#define UNROLL  // unrolled vectors without registers of their size take minutes to compile
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AMX_TILE__) || defined(OCTAVO_EMULATED_TILES)
#define OCTAVO_TILES  // products of matrices are made on tiles (tile.h)
#endif
#if defined(__aarch64__) && !defined(OCTAVO_EMULATED_TILES)
#define OCTAVO_NEON  // some operations are those of neon.h
#endif

OCTAVO_BEGIN

#if defined(__AVX512F__) || defined(OCTAVO_TILES)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(OCTAVO_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint64_t vl __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

OCTAVO_END
#if defined(OCTAVO_NEON)
#include "neon.h"
#endif
OCTAVO_BEGIN

template <class T>
INLINE T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
INLINE T max(T a, T b) {
  return a < b ? b : a;
}
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sets every lane to a (adding -0 would lose the sign of a zero, subtracting +0 does not)
INLINE vf splat(float a) { return a - vf{}; }
INLINE vi splat_int(int32_t a) { return a - vi{}; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(OCTAVO_NEON)
  return neon_fma(a, b, c);
#else
  return a * b + c;
#endif
}
INLINE vf fma(float a, vf b, vf c) { return fma(splat(a), b, c); }

// Returns the larger of two, lane by lane; b where either is NaN.
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Multiplies the even lanes by b; each product is as wide as two lanes.
INLINE vl multiply_even(vu a, uint32_t b) {
#if defined(__AVX512F__)
  return (vl)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32(int(b)));
#elif defined(__AVX2__)
  return (vl)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32(int(b)));
#elif defined(OCTAVO_NEON)
  return neon_multiply_even(a, b);
#else
  return ((vl)a & 0xFFFFFFFFull) * uint64_t(b);
#endif
}

// Returns true if any lane of a comparison is true.
INLINE bool any(vi a) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)a, (__m512i)a) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)a, (__m256i)a);
#else
  int32_t bits = 0;
  UNROLL for (int i = 0; i < W; i++) bits |= a[i];
  return bits != 0;
#endif
}

// Returns lanes of a, and, from index W on, of b.
INLINE vu shuffle(vu a, vu b, vu index) {
#if defined(__AVX512F__)
  return (vu)_mm512_permutex2var_epi32((__m512i)a, (__m512i)index, (__m512i)b);
#elif defined(__clang__)
  vu v;
  for (int i = 0; i < W; i++) v[i] = index[i] < uint32_t(W) ? a[index[i]] : b[index[i] - W];
  return v;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

INLINE vi iota() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

INLINE vf lanes() {
  vf v;
  for (int i = 0; i < W; i++) v[i] = float(i);
  return v;
}

// Folds lanes in halves: every sum in the engine has this order.
#if defined(__AVX2__)
template <class F>
INLINE float fold_halves(vf v, F f) {
#if defined(__AVX512F__)
  const __m256 half = f(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 half = (__m256)v;
#endif
  __m128 q = f(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = f(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(f(q, _mm_shuffle_ps(q, q, 1)));
}
struct Sum {
  INLINE __m256 operator()(__m256 a, __m256 b) const { return a + b; }
  INLINE __m128 operator()(__m128 a, __m128 b) const { return a + b; }
};
struct Max {
  INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};
INLINE float reduce_sum(vf v) { return fold_halves(v, Sum{}); }
INLINE float reduce_max(vf v) { return fold_halves(v, Max{}); }
#else
INLINE float reduce_sum(vf v) {
  float a[W];
  memcpy(a, &v, sizeof a);
  UNROLL for (int h = W / 2; h > 0; h /= 2)
    UNROLL for (int i = 0; i < h; i++) a[i] += a[i + h];
  return a[0];
}
INLINE float reduce_max(vf v) {
  float a[W];
  memcpy(a, &v, sizeof a);
  UNROLL for (int h = W / 2; h > 0; h /= 2)
    UNROLL for (int i = 0; i < h; i++) a[i] = a[i] > a[i + h] ? a[i] : a[i + h];
  return a[0];
}
#endif

// ---- bits of the 16-bit formats <-> float32, W at a time ----

INLINE vu widen_bits(vh h) {
#if defined(__AVX512F__)  // GCC 12 would split it in halves
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}

INLINE vf widen(vh h, bf16) { return (vf)(widen_bits(h) << 16); }

// Returns numbers whose high halves are v as bfloat16, to nearest, ties to even.
INLINE vu round_halves(vf v) {
  vu u = (vu)v;
  return (u & 0x7fffffffu) > 0x7f800000u ? vu{} + 0x7fc00000u : u + 0x7fffu + ((u >> 16) & 1u);
}
INLINE vh narrow(vf v, bf16) { return __builtin_convertvector(round_halves(v) >> 16, vh); }

INLINE vf widen(vh h, f16) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(OCTAVO_NEON)
  return neon_widen(h, f16{});
#else
  vu u = widen_bits(h);
  vu sign = (u & 0x8000u) << 16, body = (u & 0x7fffu) << 13;
  vf scaled = (vf)body * 0x1p112f;  // exact: also makes subnormals normal
  vu magnitude = body >= (0x7c00u << 13) ? body | 0x7f800000u : (vu)scaled;
  return (vf)(magnitude | sign);
#endif
}

INLINE vh narrow(vf v, f16) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(OCTAVO_NEON)
  return neon_narrow(v, f16{});
#else
  vu u = (vu)v, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    // Normal results: round the mantissa in place. Subnormal ones: adding 0.5 aligns the result's
    // last bit with the last bit of the sum, so that the addition rounds.
  vu normal = (a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
  vu small = (vu)((vf)a + 0.5f) - 0x3f000000u;
  vu r = a < 0x38800000u ? small : normal;
  r = a >= 0x477ff000u ? vu{} + 0x7c00u : r;  // 65520 and up round to infinity
  r = a > 0x7f800000u ? vu{} + 0x7e00u : r;
  return __builtin_convertvector(r | sign, vh);
#endif
}

// acc + the products of two pairs of bfloat16 numbers in each lane, if the processor supports it
#if defined(__AVX512BF16__)
#define OCTAVO_DOT_BF16
INLINE vf dot_bf16(vf acc, vu a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#elif defined(OCTAVO_DOT_BF16)
INLINE vf dot_bf16(vf acc, vu a, vu b) { return neon_dot_bf16(acc, a, b); }
#endif

// ---- loads and stores: T is float, bf16 or f16; n < W lanes for a tail, the others read as zero ----

template <class V>
INLINE V load_raw(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vf load(const float* p) { return load_raw<vf>(p); }
template <class T>
INLINE vf load(const T* p) {
  return widen(load_raw<vh>(p), T{});
}
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
template <class T>
INLINE void store(T* p, vf v) {
  vh h = narrow(v, T{});
  memcpy(p, &h, sizeof h);
}
// GCC, which peels the loop where `load` is inlined, warns of an overrun that `n >= W` excludes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations"
template <class T>
INLINE vf load(const T* p, int n) {
  if (n >= W) return load(p);
  T a[W] = {};
  for (int i = 0; i < n; i++) a[i] = p[i];
  return load(a);
}
#pragma GCC diagnostic pop
template <class T>
INLINE void store(T* p, vf v, int n) {
  if (n >= W) return store(p, v);
  T a[W];
  store(a, v);
  for (int i = 0; i < n; i++) p[i] = a[i];
}

// Returns v rounded as by a store as T and a load
INLINE vf round_to(vf v, float) { return v; }
INLINE vf round_to(vf v, bf16) { return (vf)(round_halves(v) & 0xffff0000u); }
template <class T>
INLINE vf round_to(vf v, T) {
  return widen(narrow(v, T{}), T{});
}

// Transposes W vectors of W lanes.
INLINE void transpose(vu (&v)[W]) {
  UNROLL for (int step = 1; step < W; step *= 2) {
    vu low, high;  // lanes of a pair of vectors, the second one's from W on
    UNROLL for (int i = 0; i < W; i++) {
      low[i] = uint32_t(i & step ? W + i - step : i);
      high[i] = uint32_t(i & step ? W + i : i + step);
    }
    UNROLL for (int i = 0; i < W; i++)
      if (!(i & step)) {
        const vu a = v[i], b = v[i + step];
        v[i] = shuffle(a, b, low), v[i + step] = shuffle(a, b, high);
      }
  }
}

// Calls f with a value of the C++ type of a dtype.
template <class F>
INLINE void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
  }
}

OCTAVO_END
