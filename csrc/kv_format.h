// The 8-bit forms of a KV cache: how the numbers of one head of one token become bytes, and how bytes
// become numbers of the model's type again.
//
// e4m3 and e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433) hold the
// numbers themselves, to nearest, ties to even; what is beyond the largest finite one becomes that,
// NaN stays NaN. int8 holds multiples of a scale that each head of each token has for itself, so that
// what is cached never depends on other tokens; with a number that is not finite the scale is NaN.
// Every type of a model holds each of these bytes exactly, the scale of int8 left aside.
#pragma once
#include "quant.h"

OCTAVO_BEGIN

// Bytes of the scale of a head of a token; they lie behind the numbers of the block.
template <class C>
constexpr int kScaleBytes = 0;
template <>
constexpr int kScaleBytes<i8> = sizeof(float);

// ---- to bytes ----

// An FP8 format: `M` bits of mantissa; all magnitudes above kLargest are NaN, but for an infinity that
// nothing here writes.
template <class C>
struct Fp8;
template <>
struct Fp8<e4m3> {
  static constexpr int M = 3, kBias = 7, kLargest = 0x7e;
  static constexpr float kMax = 448.0f;
};
template <>
struct Fp8<e5m2> {
  static constexpr int M = 2, kBias = 15, kLargest = 0x7b;
  static constexpr float kMax = 57344.0f;
};

template <class C>
INLINE vi narrow_fp8(vf v) {
  constexpr int shift = 23 - Fp8<C>::M, bias = 127 - Fp8<C>::kBias;
  const vu u = (vu)v, a = u & 0x7fffffffu, most = (vu)splat(Fp8<C>::kMax), b = a < most ? a : most;
  // As for f16 in simd.h: normal results by rounding the bits, subnormal ones by an addition.
  const vf magic = splat(float(1 << (24 - Fp8<C>::kBias - Fp8<C>::M)));
  const vu small = (vu)((vf)b + magic) - (vu)magic;
  const vu even = (b >> shift) & 1u;
  const vu normal = (b + ((1u << (shift - 1)) - 1) + even - (uint32_t(bias) << 23)) >> shift;
  const vu finite = b < (uint32_t(bias + 1) << 23) ? small : normal;
  return (vi)((a > 0x7f800000u ? vu{} + 0x7fu : finite) | ((u >> 24) & 0x80u));
}

// x[n] -> to[n], the last vector padded; returns the scale.
template <class T, class C>
INLINE float narrow_head(const T* x, C* to, int64_t n) {
  for_lanes(n, [&](int64_t d, int count) {
    const vb b = to_bytes(narrow_fp8<C>(load(x + d, count)));
    memcpy(to + d, &b, sizeof b);
  });
  return 1.0f;
}

template <class T>
INLINE float narrow_head(const T* x, i8* to, int64_t n) {
  const float most = largest(x, n);
  const vf inverse = splat(inverse_scale(most));
  for_lanes(n, [&](int64_t d, int count) {
    const vb b = to_bytes(round_to_int(load(x + d, count) * inverse));
    memcpy(to + d, &b, sizeof b);
  });
  return most <= 3.402823466e38f ? byte_scale(most) : NAN;
}

// ---- from bytes ----

typedef uint8_t vub __attribute__((vector_size(W)));

INLINE vf widen(const e5m2* p) {  // the upper half of float16
  return widen((vh)(__builtin_convertvector(load_raw<vub>(p), vh) << 8), f16{});
}

INLINE vf widen(const e4m3* p) {
  const vh b = __builtin_convertvector(load_raw<vub>(p), vh);
  const vf v = widen((vh)((b & 0x80) << 8 | (b & 0x7f) << 7), f16{}) * 256.0f;
  return ((vu)v & 0x7fffffffu) > (vu)splat(448.0f) ? splat(NAN) : v;
}

INLINE vf widen(const i8* p) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepi8_epi32(load_raw<__m128i>(p)));
#else
  return to_float(__builtin_convertvector(load_raw<vb>(p), vi));
#endif
}

// from[kWidened] -> to[kWidened]
constexpr int kWidened = 64;
template <class T, class C>
INLINE void widen_some(T* to, const C* from) {
  UNROLL for (int i = 0; i < kWidened; i += W) store(to + i, widen(from + i));
}

#if defined(__AVX512BW__)
// An FP8 format's magnitudes as bfloat16
template <class C>
struct Magnitudes {
  uint16_t bits[128];
  constexpr Magnitudes() : bits() {
    constexpr int M = Fp8<C>::M, kBias = Fp8<C>::kBias;
    for (int i = 0; i < 128; i++) {
      int exponent = i >> M, mantissa = i & ((1 << M) - 1);
      if (exponent == 0 && mantissa > 0) {
        for (exponent = 1; mantissa < 1 << M; exponent--) mantissa *= 2;
        mantissa -= 1 << M;
      }
      const int normal = (exponent + 127 - kBias) << 7 | mantissa << (7 - M);
      bits[i] = uint16_t(i == 0 ? 0 : i <= Fp8<C>::kLargest ? normal : 0x7fc0);
    }
  }
};
template <class C>
alignas(64) constexpr Magnitudes<C> kMagnitudes;

template <class C>
INLINE void widen_some(bf16* to, const C* from) {
  const uint16_t* t = kMagnitudes<C>.bits;
  const __m512i t0 = _mm512_load_si512(t), t1 = _mm512_load_si512(t + 32);
  const __m512i t2 = _mm512_load_si512(t + 64), t3 = _mm512_load_si512(t + 96);
  UNROLL for (int i = 0; i < kWidened; i += 32) {
    const __m512i b = _mm512_cvtepi8_epi16(load_raw<__m256i>(from + i));
    const __mmask32 upper = _mm512_test_epi16_mask(b, _mm512_set1_epi16(0x40));
    __m512i v = _mm512_permutex2var_epi16(t0, b, t1);
    v = _mm512_mask_mov_epi16(v, upper, _mm512_permutex2var_epi16(t2, b, t3));
    const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
    _mm512_storeu_si512(to + i, _mm512_ternarylogic_epi32(v, b, sign, 0xf8));  // v | (b & sign)
  }
}

INLINE void widen_some(bf16* to, const i8* from) {
  alignas(64) static constexpr int16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  UNROLL for (int i = 0; i < kWidened; i += 32)
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16((__m512i)widen(from + i),
                                                          _mm512_load_si512(kUpper),
                                                          (__m512i)widen(from + i + W)));
}
#endif

// from[n] -> to[n], n a multiple of kWidened. `next`: n bytes that are wanted after these, to be
// fetched from memory meanwhile, or null.
template <class T, class C>
NOINLINE void widen_all(T* to, const C* from, const C* next, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidened) {
    if (next) __builtin_prefetch(next + i);
    widen_some(to + i, from + i);
  }
}

OCTAVO_END
