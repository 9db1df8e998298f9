// 8-bit formats of a KV cache: conversion of the numbers of one head of one token to bytes, and of
// bytes to numbers of the model's type.
//
// e4m3 and e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433) hold the
// numbers themselves, rounded to nearest, ties to even. Numbers beyond the largest finite one are
// clamped to it; NaN stays NaN. int8 holds multiples of a scale for each head of each token, so
// that cached numbers never depend on other tokens; if a number is not finite, the scale is NaN.
// Every type of a model can represent the numbers of these formats exactly, except for the scale of
// int8.
#pragma once
#include "bytes.h"

OCTAVO_BEGIN

// Bytes of the scale of a head of a token; the scales follow the numbers of the block.
template <class C>
constexpr int kScaleBytes = 0;
template <>
constexpr int kScaleBytes<i8> = sizeof(float);

// ---- to bytes ----

// `M`: bits of the mantissa, below those of the exponent. Magnitudes above kLargest are NaN (and an
// infinity that this code never writes). int8 only has subnormal numbers: m * 2^(1 - kBias - M) =
// m.
template <class C>
struct Format;
template <>
struct Format<e4m3> {
  static constexpr int M = 3, kBias = 7, kLargest = 0x7e;
  static constexpr float kMax = 448.0f;
};
template <>
struct Format<e5m2> {
  static constexpr int M = 2, kBias = 15, kLargest = 0x7b;
  static constexpr float kMax = 57344.0f;
};
template <>
struct Format<i8> {
  static constexpr int M = 7, kBias = -6, kLargest = 0x7f;
};

template <class C>
INLINE vi narrow_fp8(vf v) {
  constexpr int shift = 23 - Format<C>::M, bias = 127 - Format<C>::kBias;
  const vu u = (vu)v, a = u & 0x7fffffffu, most = (vu)splat(Format<C>::kMax), b = a < most ? a : most;
  // Like f16 in simd.h: round the bits of normal results; round subnormal ones by an addition.
  const vf magic = splat(float(1 << (24 - Format<C>::kBias - Format<C>::M)));
  const vu small = (vu)((vf)b + magic) - (vu)magic;
  const vu even = (b >> shift) & 1u;
  const vu normal = (b + ((1u << (shift - 1)) - 1) + even - (uint32_t(bias) << 23)) >> shift;
  const vu finite = b < (uint32_t(bias + 1) << 23) ? small : normal;
  return (vi)((a > 0x7f800000u ? vu{} + 0x7fu : finite) | ((u >> 24) & 0x80u));
}

// Converts x[n] to to[n], the last vector padded; returns the scale.
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

// ---- from bytes: by bfloat16, which can represent each of them ----

constexpr int kWidened = 64;  // numbers at a time

typedef int8_t v2b __attribute__((vector_size(2 * W)));
typedef int16_t v2h __attribute__((vector_size(4 * W)));

INLINE v2h sign_extend(v2b b) {
#if defined(__AVX512BW__)  // GCC 12 would split it in halves
  return (v2h)_mm512_cvtepi8_epi16((__m256i)b);
#else
  return __builtin_convertvector(b, v2h);
#endif
}

#if defined(__AVX512BW__)
// Magnitudes of a format as bfloat16
template <class C>
struct Magnitudes {
  uint16_t bits[128];
  constexpr Magnitudes() : bits() {
    constexpr int M = Format<C>::M, kBias = Format<C>::kBias;
    for (int i = 1; i < 128; i++) {
      int exponent = i >> M, mantissa = i & ((1 << M) - 1);
      if (exponent == 0) {  // subnormal
        for (exponent = 1; mantissa < 1 << M; exponent--) mantissa *= 2;
        mantissa -= 1 << M;
      }
      bits[i] = uint16_t((exponent + 127 - kBias) << 7 | mantissa << (7 - M));
      if (i > Format<C>::kLargest) bits[i] = 0x7fc0;
    }
  }
};
template <class C>
alignas(64) constexpr Magnitudes<C> kMagnitudes;

// Returns the bits of bfloat16 numbers whose codes have been sign-extended.
template <class C>
INLINE v2h to_bf16(v2h codes, C) {
  const uint16_t* t = kMagnitudes<C>.bits;
  const __m512i t0 = _mm512_load_si512(t), t1 = _mm512_load_si512(t + 32);
  const __m512i t2 = _mm512_load_si512(t + 64), t3 = _mm512_load_si512(t + 96);
  const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
  const __m512i b = (__m512i)codes;
  const __m512i m = std::is_same_v<C, i8> ? _mm512_abs_epi16(b) : b;  // in the lowest 7 bits
  const __mmask32 upper = _mm512_test_epi16_mask(m, _mm512_set1_epi16(0x40));
  __m512i v = _mm512_permutex2var_epi16(t0, m, t1);
  v = _mm512_mask_mov_epi16(v, upper, _mm512_permutex2var_epi16(t2, m, t3));
  return (v2h)_mm512_ternarylogic_epi32(v, b, sign, 0xf8);  // v | (b & sign)
}
#else
// The bits of a bfloat16 are nearly the logarithm of the number: linear between powers of two. So
// is a magnitude m of an FP8 format, except for subnormal numbers, where m is the number itself.
// Their graph is concave, so it is the minimum of the lines of its pieces.
template <class C>
INLINE v2h to_bf16(v2h b, C) {
  constexpr int M = Format<C>::M, kSmallest = 127 - Format<C>::kBias - M;
  const v2h m = b & 0x7f;
  v2h v = (m << 7) + int16_t(kSmallest << 7);
  UNROLL for (int k = 1; k <= M; k++) {
    const v2h line = (m << (7 - k)) + int16_t((kSmallest + k) << 7);
    v = line < v ? line : v;
  }
  v = m > int16_t(Format<C>::kLargest) ? v2h{} + int16_t(0x7fc0) : v;
  return (m > 0 ? v : v2h{}) | (b & int16_t(0x8000));
}

// Converts two numbers in a lane; the upper half of their float32 suffices.
INLINE v2h to_bf16(v2h codes, i8) {
  const vi b = (vi)codes;
  const vu low = (vu)to_float((b << 16) >> 16), high = (vu)to_float(b >> 16);
  return (v2h)(low >> 16 | (high & 0xffff0000u));
}
#endif

template <class C>
INLINE void widen_some(bf16* to, const C* from) {
  UNROLL for (int i = 0; i < kWidened; i += 2 * W) {
    const v2h v = to_bf16(sign_extend(load_raw<v2b>(from + i)), C{});
    memcpy(to + i, &v, sizeof v);
  }
}

template <class T, class C>
INLINE void widen_some(T* to, const C* from) {
  alignas(64) bf16 exact[kWidened];
  widen_some(exact, from);
  UNROLL for (int i = 0; i < kWidened; i += W) store(to + i, load(exact + i));
}

// Converts from[n] to to[n]. `next`: n bytes that are needed next, to be prefetched meanwhile, or
// null.
template <class T, class C>
NOINLINE void widen_all(T* to, const C* from, const C* next, int64_t n) {
  int64_t i = 0;
  for (; i + kWidened <= n; i += kWidened) {
    if (next) __builtin_prefetch(next + i);
    widen_some(to + i, from + i);
  }
  if (i == n) return;
  C rest[kWidened] = {};
  T widened[kWidened];
  memcpy(rest, from + i, n - i);
  widen_some(widened, rest);
  memcpy(to + i, widened, (n - i) * sizeof(T));
}

OCTAVO_END
