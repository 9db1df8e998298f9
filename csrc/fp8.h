// Linear layers with weights in 8-bit floats (e4m3, see kv_format.h): out = x * weight^T + bias.
// Codes stay in memory; they are unpacked in registers, or for many rows once into a buffer. x stays
// as it is: the numbers of e4m3 are exact in every type of a model.
//
// Packed in panels of kPanel outputs as bfloat16 is (gemm.h), K padded with zeros in the same way:
//   codes [n / kPanel][padded k / kPacked][kPanel][kPacked], then float32 scales [n / kPanel][groups][kPanel]
// A group has `group` inputs, or all if that is 0.
//
// A result is the sum over groups, from first to last, of the group's sum times its scale. The
// group's sum has the order of the product with plain weights of the type that the codes are
// unpacked to: the same for every number of rows.
#pragma once
#include "kv_format.h"
#if defined(OCTAVO_TILES)
#include "gemm_tiles.h"
#endif

OCTAVO_BEGIN

// Number of rows for which codes are unpacked in registers at once
constexpr int kFp8Rows = kRegisters == 32 ? 4 : 2;
// Number of rows up to which codes are unpacked in registers, again for every kFp8Rows rows. With few
// registers, a buffer takes less time.
constexpr int kMostFp8Rows = kRegisters == 32 ? 16 : 2;
template <class A>
constexpr int64_t kFp8Chunk = 256 / sizeof(A);  // inputs of a panel that are unpacked at once
constexpr int64_t kMostFp8Chunk = 128;  // largest group

// Code of a number that is multiplied by x of type A
template <class A>
struct Fp8 {
  uint8_t bits;
};

// Factor by which unpacked numbers are still to be multiplied
template <class A>
constexpr float kFp8Unit = 256.0f;

#if defined(__AVX512BF16__)
// A lane has the codes of inputs 2, 0, 3 and 1 of four. Shifts move the codes of inputs 0 and 1, or of 2
// and 3, to the upper bytes of two bfloat16 numbers: a dot product needs such pairs.
constexpr int kPacked = 4;
typedef vu Packed;  // codes of W outputs
constexpr int kPlace[kPacked] = {1, 3, 0, 2};  // byte of each input

// Bits of bfloat16 numbers of inputs 0 and 1, and of inputs 2 and 3.
struct Fp8Pairs {
  __m512i first, second;
};

INLINE bool any_subnormal(const Fp8<bf16>* w) {  // of kPanel outputs; zero is one
  const __m512i exponent = _mm512_set1_epi8(0x78);
  __mmask64 some = 0;
  UNROLL for (int j = 0; j < kVectors; j++)
    some |= _mm512_testn_epi8_mask(load_raw<__m512i>(w + 4 * j * W), exponent);
  return some;
}

// A normal number has its sign, its exponent and its mantissa at one distance from their places in
// bfloat16; only the bias differs. Few weights are subnormal.
template <bool Subnormal>
INLINE Fp8Pairs unpack_fp8(const Fp8<bf16>* w) {
  const __m512i codes = load_raw<__m512i>(w), others = _mm512_slli_epi16(codes, 8);
  if constexpr (Subnormal)
    return {(__m512i)to_bf16((v2h)_mm512_srai_epi16(codes, 8), e4m3{}),
            (__m512i)to_bf16((v2h)_mm512_srai_epi16(others, 8), e4m3{})};
  const __m512i kept = _mm512_set1_epi16(int16_t(0x87f0));
  const __m512i bias = _mm512_set1_epi16((127 - Format<e4m3>::kBias) << 7);
  return {_mm512_add_epi16(_mm512_and_si512(_mm512_srai_epi16(codes, 4), kept), bias),
          _mm512_add_epi16(_mm512_and_si512(_mm512_srai_epi16(others, 4), kept), bias)};
}

template <>
constexpr float kFp8Unit<bf16> = 1.0f;

template <>
struct Panel<Fp8<bf16>> {
  using A = bf16;
  static constexpr int kStep = kPacked;
  template <int R, bool Subnormal>
  static INLINE void add(vf (&acc)[R][kVectors], const bf16* x, int64_t stride, const Fp8<bf16>* w) {
    UNROLL for (int j = 0; j < kVectors; j++) {
      const Fp8Pairs b = unpack_fp8<Subnormal>(w + 4 * j * W);
      UNROLL for (int i = 0; i < R; i++) {
        const bf16* at = x + i * stride;
        acc[i][j] = dot_bf16(acc[i][j], (vu)splat_int(load_raw<int>(at)), (vu)b.first);
        acc[i][j] = dot_bf16(acc[i][j], (vu)splat_int(load_raw<int>(at + 2)), (vu)b.second);
      }
    }
  }
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const bf16* x, int64_t stride, const Fp8<bf16>* w) {
    if (__builtin_expect(any_subnormal(w), 0)) return add<R, true>(acc, x, stride, w);
    add<R, false>(acc, x, stride, w);
  }
};

// Unpacks `depth` inputs of a panel; prefetches as many after them.
INLINE void unpack_fp8(const Fp8<bf16>* from, int64_t depth, bf16* to) {
  auto store_pairs = [&](auto subnormal) {
    UNROLL for (int j = 0; j < kVectors; j++) {
      const Fp8Pairs pairs = unpack_fp8<subnormal.value>(from + 4 * j * W);
      memcpy(to + 2 * j * W, &pairs.first, sizeof pairs.first);
      memcpy(to + 2 * kPanel + 2 * j * W, &pairs.second, sizeof pairs.second);
    }
  };
  for (int64_t p = 0; p < depth; p += kPacked, from += kPacked * kPanel, to += kPacked * kPanel) {
    UNROLL for (int j = 0; j < kVectors; j++) __builtin_prefetch(from + depth * kPanel + 4 * j * W);
    if (__builtin_expect(any_subnormal(from), 0))
      store_pairs(std::true_type{});
    else
      store_pairs(std::false_type{});
  }
}

// Unpacks the codes of input i of four.
INLINE vf unpack_fp8(vu codes, int i) {
  const vi top = (vi)(codes << (24 - 8 * kPlace[i]));
  return (vf)((top >> 4) & int(0x87f00000)) * splat(0x1p112f);  // without the factor kFp8Unit
}
#else
constexpr int kPacked = 2;
typedef vh Packed;
constexpr int kPlace[kPacked] = {0, 1};

#if defined(OCTAVO_DOT_BF16)
template <>
constexpr float kFp8Unit<bf16> = 1.0f;

template <>
struct Panel<Fp8<bf16>> {
  using A = bf16;
  static constexpr int kStep = 2;
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const bf16* x, int64_t stride, const Fp8<bf16>* w) {
    vu b[kVectors];
    UNROLL for (int j = 0; j < kVectors; j++)
      b[j] = (vu)to_bf16(sign_extend(load_raw<v2b>(w + 2 * j * W)), e4m3{});
    UNROLL for (int i = 0; i < R; i++) {
      const vu a = (vu)splat_int(load_raw<int>(x + i * stride));
      UNROLL for (int j = 0; j < kVectors; j++) acc[i][j] = dot_bf16(acc[i][j], a, b[j]);
    }
  }
};
#endif

// Unpacks `depth` inputs of a panel; prefetches as many after them.
INLINE void unpack_fp8(const Fp8<bf16>* from, int64_t depth, bf16* to) {
  for (int64_t p = 0; p < depth; p += 2, from += 2 * kPanel, to += 2 * kPanel) {
    __builtin_prefetch(from + depth * kPanel);
    UNROLL for (int j = 0; j < 2 * kPanel; j += 2 * W) {
      const v2h v = to_bf16(sign_extend(load_raw<v2b>(from + j)), e4m3{});
      memcpy(to + j, &v, sizeof v);
    }
  }
}

// Unpacks the codes of input i of two to float32, by float16, whose exponents are larger by 8.
INLINE vf unpack_fp8(vh pairs, int i) {
  typedef int16_t vs __attribute__((vector_size(2 * W)));
  const vs high = (vs)(i ? pairs : pairs << 8);
  return widen((vh)((high >> 1) & int16_t(0xbf80)), f16{});
}
#endif

template <>
struct Panel<Fp8<float>> {
  using A = float;
  static constexpr int kStep = kPacked;
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const float* x, int64_t stride, const Fp8<float>* w) {
    UNROLL for (int p = 0; p < kPacked; p++)
      UNROLL for (int j = 0; j < kVectors; j++) {
        const vf b = unpack_fp8(load_raw<Packed>(w + kPacked * j * W), p);
        UNROLL for (int i = 0; i < R; i++) acc[i][j] = fma(x[i * stride + p], b, acc[i][j]);
      }
  }
};

INLINE void unpack_fp8(const Fp8<float>* from, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; k += kPacked, from += kPacked * kPanel, to += kPacked * kPanel) {
    UNROLL for (int line = 0; line < kPacked * kPanel; line += 64)
      __builtin_prefetch(from + depth * kPanel + line);
    UNROLL for (int j = 0; j < kVectors; j++) {
      const Packed codes = load_raw<Packed>(from + kPacked * j * W);
      UNROLL for (int p = 0; p < kPacked; p++) store(to + p * kPanel + j * W, unpack_fp8(codes, p));
    }
  }
}

INLINE int64_t fp8_groups(int64_t k, int64_t group) { return group ? ceil_div(k, group) : 1; }

// Scales of the panel at column col: [groups][kPanel].
template <class Args>
INLINE const float* fp8_scales(const Args& a, int64_t col) {
  const int64_t codes = ceil_div(a.n, kPanel) * kPanel * padded_k<bf16>(a.k);
  return reinterpret_cast<const float*>(static_cast<const char*>(a.weight) + codes) +
         col * fp8_groups(a.k, a.group);
}

// c[rows][kPanel] *= unit * scales[kPanel]
INLINE void scale_sums(float* c, int64_t rows, const float* scales, float unit) {
  for (int64_t i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < kPanel; j += W) {
      float* at = c + i * kPanel + j;
      store(at, load(at) * (load(scales + j) * unit));
    }
}

// c[rows][kPanel] += sums * unit * scales[kPanel]
INLINE void add_scaled(const float* sums, int64_t rows, const float* scales, float unit, float* c) {
  for (int64_t i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < kPanel; j += W) {
      float* at = c + i * kPanel + j;
      store(at, fma(load(sums + i * kPanel + j), load(scales + j) * unit, load(at)));
    }
}

// c[rows][kPanel] = x[rows][k] * the panel at column col. `P`: what the weights of a chunk are read
// as: codes, or numbers of type A.
template <class P, class A>
INLINE void fp8_panel(const LinearQArgs& a, const A* x, int64_t stride, int64_t rows, int64_t col,
                      float* c) {
  constexpr bool unpacked = std::is_same_v<P, A>;
  using F = std::conditional_t<unpacked, Fetch<0, 0>, Fetch<kLines<Fp8<A>>, 2>>;
  constexpr int R = unpacked ? kRows<A> : kFp8Rows;
  const Fp8<A>* codes = static_cast<const Fp8<A>*>(a.weight) + col * padded_k<bf16>(a.k);
  const float* scales = fp8_scales(a, col);
  const int64_t chunk = a.group ? a.group : unpacked ? kFp8Chunk<A> : a.k;
  const int64_t some = ceil_div(rows, ceil_div(rows, R));
  memset(c, 0, rows * kPanel * sizeof(float));
  for (int64_t from = 0; from < a.k; from += chunk, codes += chunk * kPanel) {
    const int64_t depth = min(chunk, a.k - from);
    alignas(64) A numbers[unpacked ? kMostFp8Chunk * kPanel : 1];
    const P* w;
    if constexpr (unpacked)
      unpack_fp8(codes, depth, numbers), w = numbers;
    else
      w = codes;
    const P* ahead = w + (unpacked ? 0 : kStreamAhead);
    for (int64_t i = 0; i < rows; i += some) {
      const int count = int(min(some, rows - i));
      const A* at = x + i * stride + from;
      float* out = c + i * kPanel;
      if (!a.group) {
        micro_kernels<P, F, R>(count, at, stride, w, depth, false, out, ahead);
        continue;
      }
      alignas(64) float sums[R * kPanel] = {};
      micro_kernels<P, F, R>(count, at, stride, w, depth, false, sums, ahead);
      add_scaled(sums, count, scales, kFp8Unit<A>, out);
    }
    if (a.group) scales += kPanel;
  }
  if (!a.group) scale_sums(c, rows, scales, kFp8Unit<A>);
}

template <class A, class T>
INLINE void fp8_rows(const LinearQArgs& a, T t, const A* x, int64_t stride, int64_t row0, int64_t m) {
  const int64_t cost = ceil_div(a.n, kPanel) * kVectors * m * a.k;
  for_tiles(a, t, row0, m, cost, whole_sums([&](int64_t first, int64_t rows, int64_t col, float* c) {
    const A* at = x + first * stride;
    if (rows <= kMostFp8Rows)
      fp8_panel<Fp8<A>>(a, at, stride, rows, col, c);
    else
      fp8_panel<A>(a, at, stride, rows, col, c);
  }));
}

OCTAVO_END
