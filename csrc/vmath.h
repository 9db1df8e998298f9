// exp, log, tanh and erf on vectors, within about 2 ulp of the true value, for every float32 input
// (infinities, NaN and subnormals included). Argument reduction as in Muller, "Elementary Functions",
// chapter 11; the polynomials are weighted minimax fits made for these intervals.
#pragma once
#include "simd.h"

OCTAVO_BEGIN

template <int N>
INLINE vf polynomial(const float (&c)[N], vf x) {
  vf r = splat(c[N - 1]);
  UNROLL for (int i = N - 2; i >= 0; i--) r = fma(r, x, splat(c[i]));
  return r;
}

INLINE vf abs(vf x) { return (vf)((vu)x & 0x7fffffffu); }
INLINE vf copy_sign(vf magnitude, vf sign) {
  return (vf)(((vu)magnitude & 0x7fffffffu) | ((vu)sign & 0x80000000u));
}
// x within [low, high]; NaN stays NaN
INLINE vf clamp(vf x, float low, float high) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
#else
  x = x > high ? splat(high) : x;
  return x < low ? splat(low) : x;
#endif
}
INLINE vf power_of_two(vi n) { return (vf)((n + 127) << 23); }  // -127 < n < 128

// e^x for x within [-105, 89]
INLINE vf exp_within(vf x) {
#if defined(__AVX512F__)
  vf whole = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
  const float magic = 0x1.8p23f;  // adding it leaves an integer in the low mantissa bits
  vf shifted = fma(x, splat(1.44269504f), splat(magic));
  vi n = (vi)shifted - (vi)splat(magic);
  vf whole = shifted - magic;
#endif
  vf r = fma(whole, splat(-0x1.62e4p-1f), x);  // ln 2 in two parts; the first product is exact
  r = fma(whole, splat(-1.4286068203e-06f), r);
  const float c[] = {4.999999305e-01f, 1.666651479e-01f, 4.166845679e-02f, 8.369418832e-03f,
                     1.381314454e-03f};
  vf p = fma(r * r, polynomial(c, r), r) + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  vi half = n >> 1;  // in two steps, for results that are subnormal
  return p * power_of_two(half) * power_of_two(n - half);
#endif
}

INLINE vf exp(vf x) { return exp_within(clamp(x, -105.0f, 89.0f)); }  // beyond this zero or infinity

// e^x if that is a normal number, else zero: on many processors an instruction with a subnormal
// result takes as long as a hundred others. NaN stays NaN.
INLINE vf exp_or_zero(vf x) {
  const float least = -0x1.5d589ep+6f;  // the smallest x with an exponential of at least 2^-126
  const vf e = exp(vmax(splat(least), x));
  return x < least ? vf{} : e;
}

constexpr float kLog2E = 1.44269504f;

// 2^x for x up to about 0 if that is a normal number, else zero. NaN stays NaN. c: polynomial of 2^r
// for r within [-1/2, 1/2]; the default is within 1 ulp.
constexpr float kExp2[] = {1.0f, 6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                           9.618436918e-03f, 1.339887385e-03f, 1.535336196e-04f};
template <int N = 7>
INLINE vf exp2_or_zero(vf x, const float (&c)[N] = kExp2) {
  const float magic = 0x1.8p23f + 127;  // leaves an exponent with its bias in the low mantissa bits
  const vf shifted = x + magic;
  const vf part = polynomial(c, x - (shifted - magic)), power = (vf)((vi)shifted << 23);
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_mul_ps(normal, (__m512)part, (__m512)power);
#else
  return x < -126.0f ? vf{} : part * power;
#endif
}

INLINE vf log(vf x) {
  vf normal = x < 0x1p-126f ? x * 0x1p23f : x;
  vi bias = x < 0x1p-126f ? splat_int(23) : vi{};
  // x = m * 2^e with m in [sqrt(1/2), sqrt(2))
  vi bits = (vi)normal - 0x3f3504f3;
  vi e = bits >> 23;
  vf f = (vf)((vi)normal - (e << 23)) - 1.0f;
  vf exponent = __builtin_convertvector(e - bias, vf);
  const float c[] = {3.333333079e-01f,  -2.500085115e-01f, 2.000134439e-01f,  -1.662230617e-01f,
                     1.419809235e-01f,  -1.316726182e-01f, 1.279263814e-01f,  -7.655056355e-02f};
  vf z = f * f;
  vf r = fma(z * f, polynomial(c, f), exponent * 1.4286068203e-06f);
  r = fma(z, splat(-0.5f), r);
  r = fma(exponent, splat(0x1.62e4p-1f), r + f);
  r = x == INFINITY ? x : r;
  r = x == 0.0f ? splat(-INFINITY) : r;
  return x >= 0.0f ? r : splat(NAN);
}

// log(1 + e^x), accurate also where that is small (Goldberg, "What every computer scientist should
// know about floating-point arithmetic", theorem 4).
INLINE vf softplus(vf x) {
  const vf e = exp(x), sum = 1.0f + e;
  const vf exact = sum == 1.0f ? e : log(sum) * (e / (sum - 1.0f));
  return x > 20.0f ? x : exact;
}

INLINE vf tanh(vf x) {
  vf a = abs(x), z = x * x;
  const float c[] = {-3.333332944e-01f, 1.333315218e-01f,  -5.393994253e-02f,
                     2.166340301e-02f,  -8.085626339e-03f, 2.059580781e-03f};
  vf small = fma(z * x, polynomial(c, z), x);
  vf large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return copy_sign(a < 0.625f ? small : large, x);
}

INLINE vf erf(vf x) {
  vf a = abs(x), z = x * x;
  const float near[] = {1.283791657e-01f, -3.761262582e-01f, 1.128358515e-01f, -2.685381193e-02f,
                        5.188327682e-03f, -8.010193588e-04f, 7.853861230e-05f};
  vf small = fma(x, polynomial(near, z), x);
  // log(1 - erf) on [1, 4]; beyond 4 the result is 1
  const float far[] = {-3.537195014e-04f, -1.127040036e+00f, -6.382256773e-01f, -1.030373687e-01f,
                       2.180531830e-02f,  -2.939607296e-03f, 1.855740092e-04f};
  vf t = a > 4.0f ? splat(4.0f) : a;
  vf large = 1.0f - exp_within(polynomial(far, t));
  return copy_sign(a < 1.0f ? small : large, x);
}

INLINE vf relu(vf x) { return x < 0.0f ? vf{} : x; }
INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
INLINE vf gelu(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }
// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 * x^3), which is x * sigmoid(2 * u)
INLINE vf gelu_tanh(vf x) {
  return x / (1.0f + exp(x * fma(x * x, splat(-0.0713548128f), splat(-1.59576912f))));
}
INLINE vf soft_cap(vf x, float cap) { return cap * tanh(x / cap); }

OCTAVO_END
