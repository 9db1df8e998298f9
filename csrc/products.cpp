// Products with quantized weights of one variant. They are compiled apart from its other kernels
// (kernels.cpp): at the same time, and alone for variants that differ in nothing else.
#include "quant.h"

OCTAVO_BEGIN

// ---- block types ----

#if defined(OCTAVO_TILES)
template <QuantFormat F>
const uint8_t* group_at(const LinearQArgs& a, int64_t panel, int64_t group) {
  using B = Blocks<F>;
  return static_cast<const uint8_t*>(a.weight) + panel * B::panel_nbytes(a.k) +
         B::unit_at(group / B::groups);
}

template <QuantFormat F>
void unpack_groups(const LinearQArgs& a, int64_t panel, int64_t first, int64_t count, GroupWeights& w) {
  using B = Blocks<F>;
  const uint8_t* packed = static_cast<const uint8_t*>(a.weight) + panel * B::panel_nbytes(a.k);
  unpack_units<F>(packed, first / B::groups, count / B::groups, w.scales[0], w.terms[0],
                  [&](int64_t u, int q, int j, vu codes) {
                    const vbytes v = (vbytes)codes - uint8_t(B::zero);
                    memcpy(w.bytes[j][u * kUnitQuads + q], &v, sizeof v);
                  });
}

template <QuantFormat F>
GroupKernel block_kernel() {
  constexpr int group = Blocks<F>::shape.group;
  return {group, group_at<F>, unpack_groups<F>,
          group_block<group, Blocks<F>::min ? GroupTerm::minimum : GroupTerm::none>};
}
#endif

void linear_blocks(const LinearQArgs& a) {
  const int64_t panels = ceil_div(a.n, kPanel), some = min(a.m, kQuantChunk), units = a.k / kUnit;
  const int64_t rows16 = ceil_div(some, 16) * 16, steps = ceil_div(a.k, 64);  // whole tiles
  ByteRows x;
  x.k = a.k;
  x.groups = kUnit / block_shape(a.format).group;
  const int64_t groups = rows16 * units * x.groups, nbytes = rows16 * steps * 64;
  const int64_t all = nbytes + groups * (2 * sizeof(float) + sizeof(int32_t));
  ByteRows second = x;
  second.outliers.words = ceil_div(units, 64);
  x.q = static_cast<int8_t*>(scratch(2 * all + rows16 * second.outliers.words * sizeof(uint64_t)));
  second.q = x.q + all;
  ByteRows* both[] = {&x, &second};
  for (ByteRows* rows : both) {
    rows->scales = reinterpret_cast<float*>(rows->q + nbytes);
    rows->totals = rows->scales + groups;
    rows->sums = reinterpret_cast<int32_t*>(rows->totals + groups);
  }
  second.outliers.bits = reinterpret_cast<uint64_t*>(second.q + all);
  for (int64_t row0 = 0; row0 < a.m; row0 += some) {
    const int64_t m = min(some, a.m - row0);
#if defined(OCTAVO_TILES)
    x.tiled = m > kGroupRows;
#endif
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      parallel_for(m, 4 * m * a.k / W, [&](int64_t i) {
        quantize_units(static_cast<const T*>(a.x) + (row0 + i) * a.x_stride, x, second, i);
      });
#if defined(OCTAVO_TILES)
      if (x.tiled) {
        const GroupRows rows{x.q, x.scales, x.totals, steps, units * x.groups};
        rows.clear_padding(m);
        GroupKernel kernel;
        with_block_type(a.format,
                        [&](auto format) { kernel = block_kernel<decltype(format)::value>(); });
        return group_tiles(a, t, rows, row0, m, kernel,
                           [&](int64_t first, int64_t rows, int64_t col, float* c) {
                             with_block_type(a.format, [&](auto format) {
                               add_outliers<decltype(format)::value>(a, second, first, rows, col, c);
                             });
                           });
      }
#endif
      for_tiles(a, t, row0, m, panels * kVectors * m * ceil_div(a.k, kQuad),
                whole_sums([&](int64_t first, int64_t rows, int64_t col, float* c) {
                  with_block_type(a.format, [&](auto format) {
                    block_panel<decltype(format)::value>(a, x, second, first, rows, col, c);
                  });
                }));
    });
  }
}

// ---- 8-bit floats ----

#if defined(OCTAVO_TILES)
void fp8_tiles(const LinearQArgs& a) {
  constexpr int64_t step = kTileBytes / sizeof(bf16);
  const int64_t panel_k = padded_k<bf16>(a.k), steps = panel_k / step;
  const int64_t chunk = a.group ? a.group / step : kDepth;
  const Fp8<bf16>* weight = static_cast<const Fp8<bf16>*>(a.weight);
  with_tiles(a, [&](int64_t row0, int64_t m, TileCut cut, auto tiles) {
    cut.depth = ceil_div(cut.depth, kDepth) * kDepth;  // whole groups
    auto multiply = [&](const char* x, int64_t groups, int64_t panel, int64_t from, int64_t depth,
                        char* c, int64_t, int64_t) {
      alignas(64) bf16 numbers[kDepth * kStepNbytes / sizeof(bf16)];
      const char* w = reinterpret_cast<const char*>(numbers);
      for (int64_t s = from; s < from + depth; s += chunk, x += chunk * kTileNbytes) {
        const int64_t some = min(chunk, from + depth - s);
        const Fp8<bf16>* codes = weight + (panel * panel_k + s * step) * kPanel;
        const char* next = reinterpret_cast<const char*>(codes + some * step * kPanel);
        unpack_fp8(codes, some * step, numbers);
        if (!a.group) {
          tile_block<DotBf16, 0>(x, steps * kTileNbytes, w, some, groups, c, s == 0, next);
          continue;
        }
        const float* scales = fp8_scales(a, panel * kPanel) + s / chunk * kPanel;
        for (int64_t g = 0; g < groups; g += 2) {
          alignas(64) char sums[2 * kStepNbytes];
          const int64_t count = min<int64_t>(2, groups - g);
          tile_block<DotBf16, 0>(x + g * steps * kTileNbytes, steps * kTileNbytes, w, some, count,
                                 sums, true, next);
          char* total = c + g * kStepNbytes;
          if (s == 0) memset(total, 0, count * kStepNbytes);
          add_scaled(reinterpret_cast<const float*>(sums), count * kTileRows16, scales, 1.0f,
                     reinterpret_cast<float*>(total));
        }
      }
    };
    for_tile_parts(a, m, steps, cut, tiles, multiply,
                   [&](int64_t first, int64_t rows, int64_t col, char* c, char* up) {
                     float *gate = reinterpret_cast<float*>(c), *other = reinterpret_cast<float*>(up);
                     if (!a.group) {
                       scale_sums(gate, rows, fp8_scales(a, col), 1.0f);
                       if (up) scale_sums(other, rows, fp8_scales(a, a.n / 2 + col), 1.0f);
                     }
                     write_part(a, bf16{}, a.m, row0 + first, rows, col, gate, other);
                   });
  });
}
#endif

void linear_fp8(const LinearQArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, bf16>) {
#if defined(OCTAVO_TILES)
      return fp8_tiles(a);
#elif defined(OCTAVO_DOT_BF16)
      return fp8_rows(a, t, static_cast<const T*>(a.x), a.x_stride, 0, a.m);
#endif
    }
    if constexpr (std::is_same_v<T, float>)
      fp8_rows(a, t, static_cast<const T*>(a.x), a.x_stride, 0, a.m);
    else
      with_float_rows(a, t, [&](const float* x, int64_t row0, int64_t m) {
        fp8_rows(a, t, x, a.k, row0, m);
      });
  });
}

OCTAVO_END

namespace octavo {
namespace OCTAVO_ISA {

void linear_q(const LinearQArgs& a) {
  if (is_block_type(a.format)) return linear_blocks(a);
  if (a.format == QuantFormat::fp8) return linear_fp8(a);
  with_type(a.dtype, [&](auto t) { linear_q_typed(a, t); });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
