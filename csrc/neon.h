// ARM: the only file with its intrinsics, for operations that vector extensions lack. Included by
// simd.h. Every 64-bit ARM processor supports the target of `neon` (including fused multiply-add
// and conversion of float16). `neon_dotprod` adds SDOT, `neon_bf16` BFDOT and USDOT.
#pragma once
#include <arm_neon.h>

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OCTAVO_DOT_BF16  // see dot_bf16 in simd.h
#endif
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define OCTAVO_SIGNED_CODES  // neon_dot reads codes as signed bytes
#endif

OCTAVO_BEGIN

INLINE vf neon_fma(vf a, vf b, vf c) {
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

INLINE vl neon_multiply_even(vu a, uint32_t b) {
  return (vl)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
}
INLINE vf neon_widen(vh h, f16) { return (vf)vcvt_f32_f16((float16x4_t)h); }
INLINE vh neon_narrow(vf v, f16) { return (vh)vcvt_f16_f32((float32x4_t)v); }

// acc + the products of four codes and four signed bytes in each lane
INLINE vi neon_dot(vi acc, vu codes, vi x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (vi)vusdotq_s32((int32x4_t)acc, (uint8x16_t)codes, (int8x16_t)x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, (int8x16_t)x);
#else
  // Bytes 0 and 2, then 1 and 3, as 16-bit numbers, which can hold 255 * -128
  const int16x8_t even = (int16x8_t)(codes & 0x00ff00ffu), odd = (int16x8_t)((codes >> 8) & 0x00ff00ffu);
  const int16x8_t x_even = vshrq_n_s16(vshlq_n_s16((int16x8_t)x, 8), 8);
  const int16x8_t x_odd = vshrq_n_s16((int16x8_t)x, 8);
  const int32x4_t sum = vpadalq_s16((int32x4_t)acc, vmulq_s16(even, x_even));
  return (vi)vpadalq_s16(sum, vmulq_s16(odd, x_odd));
#endif
}

// Byte by byte: the element of `table` at `index`, which is below 16
INLINE vu neon_lookup(vu table, vu index) {
  return (vu)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
}

#if defined(OCTAVO_DOT_BF16)
// Rounds to odd and treats subnormal numbers as zero (if FPCR.EBF is not set, as usual).
INLINE vf neon_dot_bf16(vf acc, vu a, vu b) {
  return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

OCTAVO_END
