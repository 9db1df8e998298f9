// Linear layers with quantized weights: out = x * weight^T + bias, where weights are unsigned codes
// and x is quantized, too, to signed bytes, so that products and the sums within a group are integers.
//
//   int8         scale * (code - 128): one float32 scale for each output, one for each row of x. Sums
//                along K are int32, so exact: a result is the same bits on every instruction set.
//   int4_levels  scale * kLevels[code] / 16 \  one float16 scale for each output and group of K, one
//   int4         scale * (code - 8)          > float32 scale for each row of x and group. Over groups
//   int4_zeros   scale * (code - zero)      |  sums are float32, from first to last, whatever m is.
//   int8_groups  scale * (code - zero)      |  The scales of int8_groups and nf4 are float32.
//   nf4          scale * kNf4Levels[code]   /
//
// Packed in panels of kPanel outputs as in gemm.h, K in fours (one 32-bit lane holds four codes of
// one output), and padded with zeros of x, which is exact:
//   int8    [n / kPanel][padded k / 4][kPanel][4], and after all panels the scales, float32 [n];
//           K is padded to a multiple of 64, since tiles (gemm_tiles.h) read 64 at once
//   int4    [n / kPanel][ceil(k / group)]{ codes [group / 8][kPanel][4], the first four of eight in
//           the low halves of the bytes; float16 scales [kPanel]; int4_zeros: zeros [kPanel] }
//   int8_groups  [n / kPanel][ceil(k / group)]{ codes [group / 4][kPanel][4], float32 scales
//           [kPanel], zeros [kPanel] }
//   nf4     as int4, with float32 scales
// The second terms of outliers (bytes.h) are added last, for all formats but int8.
// A weight may have an order of its inputs: the columns of x are put in this order before x is
// quantized.
#pragma once
#include "blocks.h"
#include "fp8.h"

OCTAVO_BEGIN

constexpr int64_t kQuantBlock8 = 2048;  // steps of K of a panel that stay in the cache
constexpr int64_t kGroupsNbytes = 27648;  // bytes of the groups of a panel that stay in L1
// int8 uses tiles for more rows than this; with fewer rows vectors are as fast as memory.
constexpr int64_t kVectorRows = 4;

// Values of the codes of int4_levels: the 16 levels with the smallest squared error for groups of
// 32 normal or somewhat heavier-tailed numbers with the largest scaled to about the first level
// (Lloyd, "Least squares quantization in PCM", alternated with the search for scales in quantize4).
// Zero is a level. The error is 7 % smaller than with 16 even steps.
constexpr int8_t kLevels[16] = {-127, -101, -76, -58, -44, -31, -20, -10,
                                0,    10,   20,  31,  43,  58,  74,  95};

alignas(64) constexpr LevelBytes kLevelBytes{kLevels};

// Values of the codes of nf4 (Dettmers et al., "QLoRA"), times 32767. Levels plus 32768 are two
// bytes: a product is that of the high bytes times 256, plus that of the low bytes.
constexpr int16_t kNf4Levels[16] = {-32767, -22812, -17205, -12940, -9320, -6054, -2983, 0,
                                    2608,   5273,   8064,   11072,  14441, 18435, 23689, 32767};

struct Nf4Bytes {
  uint8_t bytes[2][4 * W];  // high, low; minus kCodeOffset
  constexpr Nf4Bytes() : bytes() {
    for (int i = 0; i < 4 * W; i++) {
      const int level = kNf4Levels[i % 16] + 32768;
      bytes[0][i] = uint8_t((level >> 8) - kCodeOffset);
      bytes[1][i] = uint8_t((level & 255) - kCodeOffset);
    }
  }
};
alignas(64) constexpr Nf4Bytes kNf4Bytes;

// Decodes codes, one per byte, to the bytes that dot() multiplies; of nf4 to the high or low ones
template <QuantFormat F>
INLINE vu decode(vu codes, [[maybe_unused]] int part = 0) {
  if constexpr (F == QuantFormat::int8 || F == QuantFormat::int8_groups)
    return codes ^ (kCodeOffset * 0x01010101u);
  else if constexpr (F == QuantFormat::nf4)
    return look_up(load_raw<vbytes>(kNf4Bytes.bytes[part]), codes);
  else if constexpr (F != QuantFormat::int4_levels)
    return codes;
  else
    return look_up(load_raw<vbytes>(kLevelBytes.bytes), codes);
}

// ---- rows of x ----

// Quantized rows of x, padded with zeros to whole groups.
struct QuantRows {
  int8_t* q;  // [rows][stride], or tiled: [rows / 16][stride / depth][16][depth of a tile]
  float* scales;  // [rows][groups], or tiled: [rows / 16][groups][16]: the scale, times `unit`
  int32_t* sums;  // [rows][groups]: the sum of q, times -zero
  float* terms;  // [rows / 16][groups][16]: the sum of q; only if tiled
  int64_t stride, group, groups;
  int zero;  // zero of all weights; 1 if each group has its own
  float unit;  // inverse of the factor of the weights' levels
  bool tiled = false;
  Outliers outliers = {};  // groups that are not zero; only of second terms

  int8_t* at(int64_t row, int64_t k) const {
#if defined(OCTAVO_TILES)
    if (tiled) return q + in_tiles(row, k, stride / kTileBytes, tile_depth(group));
#endif
    return q + row * stride + k;
  }
};

// Stores the scale and the sum of group g of a row.
INLINE void store_group(float scale, int32_t sum, const QuantRows& to, int64_t row, int64_t g) {
  const int64_t sixteens = in_sixteens(row, g, to.groups);
  to.scales[to.tiled ? sixteens : row * to.groups + g] = scale * to.unit;
  to.sums[row * to.groups + g] = -to.zero * sum;
  if (to.tiled) to.terms[sixteens] = float(sum);
}

// Quantizes a row of x, and its second terms. A row of one group has no second term.
template <class T>
void quantize_row(const T* x, int64_t k, const QuantRows& to, const QuantRows& second, int64_t row) {
  float* most = second.scales + row * to.groups;  // until the scales are known
  for (int64_t g = 0; g < to.groups; g++)
    most[g] = largest(x + g * to.group, min(to.group, k - g * to.group));
  second.outliers.mark(row, most, to.groups);
  if (to.groups > 1) memset(second.at(row, 0), 0, to.groups * to.group);
  for (int64_t g = 0; g < to.groups; g++, x += to.group, k -= to.group) {
    const int64_t count = min(to.group, k);
    const float scale = byte_scale(most[g]);
    const vf inverse = splat(inverse_scale(most[g]));
    const bool outlier = second.outliers.marked(row, g);
    vi total = {}, total_errors = {};
    for (int64_t j = 0; j < to.group; j += W) {
      vi numbers = {};
      if (j < count) {
        const vf exact = load(x + j, int(min<int64_t>(W, count - j))) * inverse;
        numbers = round_to_int(exact);
        if (outlier) {
          const vi errors = round_to_int((exact - to_float(numbers)) * splat(kFiner));
          const vb finer = to_bytes(errors);
          memcpy(second.at(row, g * to.group + j), &finer, sizeof finer);
          total_errors += errors;
        }
      }
      total += numbers;
      const vb bytes = to_bytes(numbers);
      memcpy(to.at(row, g * to.group + j), &bytes, sizeof bytes);
    }
    store_group(scale, reduce_sum(total), to, row, g);
    store_group(outlier ? scale / kFiner : 0, reduce_sum(total_errors), second, row, g);
  }
}

// ---- 8 bits ----

// c[R][V * W] += x[R][4 * quads] * w[quads][V * W][4]: the columns of a panel from col on. `fetches`:
// prefetch codes.
template <int R, int V>
void dots8(const int8_t* x, int64_t stride, const uint8_t* w, int64_t quads, int col, bool fetches,
           int32_t* c) {
  vi acc[R][V];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) acc[i][j] = load_raw<vi>(c + i * kPanel + j * W);
  for (int64_t q = 0; q < quads; q++, w += kQuad * kPanel) {
    if (fetches)
      UNROLL for (int j = 0; j < kQuad * kPanel; j += 64) __builtin_prefetch(w + kAhead + j);
    dots<1, 128>(acc, x + q * kQuad, stride, [&](int, int j) {
      return decode<QuantFormat::int8>(load_raw<vu>(w + kQuad * col + j * kQuad * W));
    });
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) memcpy(c + i * kPanel + j * W, &acc[i][j], sizeof(vi));
}

template <int R>
INLINE void dots8(int rows, const int8_t* x, int64_t stride, const uint8_t* w, int64_t quads,
                  bool fetches, int32_t* c) {
  if (rows == R) {
    constexpr int V = R * kVectors <= kAccumulators8 ? kVectors : kVectors / 2;
    for (int col = 0; col < kPanel; col += V * W)  // the first columns prefetch the whole panel
      dots8<R, V>(x, stride, w, quads, col, fetches && col == 0, c + col);
    return;
  }
  if constexpr (R > 1) dots8<R - 1>(rows, x, stride, w, quads, fetches, c);
}

// K in a packed weight
INLINE int64_t padded_k8(int64_t k) { return ceil_div(k, 64) * 64; }

// Scales the results of rows first ... and the panel at column col: out may be sums.
INLINE void scale8(const LinearQArgs& a, const QuantRows& x, int64_t first, int64_t rows, int64_t col,
                   const void* sums, float* out) {
  const char* scales = static_cast<const char*>(a.weight) +
                       ceil_div(a.n, kPanel) * kPanel * padded_k8(a.k) + col * sizeof(float);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < kPanel; j += W) {
      const vu sum = load_raw<vu>(static_cast<const int32_t*>(sums) + i * kPanel + j) +
                     (vu)splat_int(x.sums[first + i]);
      store(out + i * kPanel + j, to_float((vi)sum) * splat(x.scales[first + i]) *
                                      load_raw<vf>(scales + j * sizeof(float)));
    }
}

// Multiplies rows first ... first + rows of x by the panel at column col.
template <class B, class E>
INLINE void panel8(const LinearQArgs& a, const QuantRows& x, int64_t first, int64_t rows, int64_t col,
                   float* out, B begin, E finish) {
  const int64_t quads = ceil_div(a.k, kQuad), block = kQuantBlock8 / kQuad;
  const uint8_t* w = static_cast<const uint8_t*>(a.weight) + col * padded_k8(a.k);
  alignas(64) int32_t c[kRowBlock * kPanel];
  memset(c, 0, rows * kPanel * sizeof(int32_t));
  for (int64_t q = 0; q < quads; q += block)
    for (int64_t i = 0; i < rows; i += kQuantRows8) {
      const bool last = q + block >= quads;
      const int64_t n = min<int64_t>(kQuantRows8, rows - i);
      if (last) begin_pass(i, kQuantRows8, rows, begin);
      dots8<kQuantRows8>(int(n), x.q + (first + i) * x.stride + q * kQuad, x.stride,
                         w + q * kQuad * kPanel, min(block, quads - q), i == 0, c + i * kPanel);
      if (!last) continue;
      scale8(a, x, first + i, n, col, c + i * kPanel, out + i * kPanel);
      finish(i, n);
    }
}

#if defined(OCTAVO_TILES)
// Multiplies m rows, from row row0 of out on; sums are whole numbers, so the bits equal panel8's.
template <class T>
INLINE void tiles8(const LinearQArgs& a, const QuantRows& x, T t, int64_t row0, int64_t m) {
  const int64_t steps = x.stride / kTileBytes;
  TileCut cut = cut_tiles(a, m, steps);
  cut.own = false;  // x is tiles already
  const char* tiles = reinterpret_cast<const char*>(x.q);
  tile_products<DotBytes>(
      a, m, steps, cut, [&](int64_t part) { return tiles + part * cut.part * steps * kTileNbytes; },
      [&](int64_t first, int64_t rows, int64_t col, char* c, char* up) {
        float *gate = reinterpret_cast<float*>(c), *other = reinterpret_cast<float*>(up);
        scale8(a, x, first, rows, col, c, gate);
        if (up) scale8(a, x, first, rows, a.n / 2 + col, up, other);
        write_part(a, t, a.m, row0 + first, rows, col, gate, other);
      });
}
#endif

// ---- groups ----

INLINE int64_t group_nbytes(int64_t group, QuantFormat format) {
  if (format == QuantFormat::int8_groups) return kPanel * (group + sizeof(float) + 1);
  if (format == QuantFormat::nf4) return kPanel * (group / 2 + sizeof(float));
  return kPanel * (group / 2 + sizeof(f16) + (format == QuantFormat::int4_zeros));
}

#if defined(OCTAVO_PAIR_SUMS)
constexpr int kGroupQuads = 8;  // quads of a group at once: sums in 16 bits have room for eight
#else
constexpr int kGroupQuads = 2;
#endif

// c[R][V * W] += x[R][groups] * w[groups][V * W]: the columns of a panel from col on, and the groups
// first ... end of rows row ... row + R. `fetches`: prefetch codes.
template <int R, int V, QuantFormat F>
void dots4(const LinearQArgs& a, const QuantRows& x, int64_t row, int64_t first, int64_t end,
           const uint8_t* w, int col, bool fetches, float* c) {
  constexpr bool bytes = F == QuantFormat::int8_groups, nf4 = F == QuantFormat::nf4;
  constexpr int64_t step_nbytes = kGroupQuads * kQuad * kPanel / (bytes ? 1 : 2);
  using Scale = std::conditional_t<bytes || nf4, float, f16>;
  const int64_t codes_nbytes = a.group / (kQuad * kGroupQuads) * step_nbytes;
  const int64_t step = group_nbytes(a.group, F);
  const float* x_scales = x.scales + row * x.groups;
  const int32_t* x_sums = x.sums + row * x.groups;
  vf sum[R][V];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) sum[i][j] = load(c + i * kPanel + j * W);
  w += first * step;
  for (int64_t g = first; g < end; g++, w += step) {
    const uint8_t *scales = w + codes_nbytes + col * sizeof(Scale);
    [[maybe_unused]] const uint8_t* zeros = w + codes_nbytes + kPanel * sizeof(Scale) + col;
    vi acc[R][V];
    UNROLL for (int i = 0; i < R; i++) {
      vi s = splat_int(x_sums[i * x.groups + g]);
      UNROLL for (int j = 0; j < V; j++) {
        if constexpr (bytes)
          acc[i][j] = multiply_small(load_zeros(zeros + j * W), s) - kCodeOffset * s;
        else if constexpr (F == QuantFormat::int4_zeros)
          acc[i][j] = multiply_small(load_zeros(zeros + j * W), s);
        else
          acc[i][j] = nf4 ? vi{} : s;
      }
    }
    for (int part = 0; part < (nf4 ? 2 : 1); part++) {
      if (part)
        UNROLL for (int i = 0; i < R; i++)
          UNROLL for (int j = 0; j < V; j++) acc[i][j] = (vi)((vu)acc[i][j] << 8);
      const uint8_t* p = w + kQuad * col;
      const int8_t* q = x.q + row * x.stride + g * a.group;
#pragma GCC unroll 4
      for (int64_t o = 0; o < a.group; o += kQuad * kGroupQuads, p += step_nbytes, q += kQuad * kGroupQuads) {
        if (fetches)
          UNROLL for (int j = 0; j < step_nbytes; j += 64) __builtin_prefetch(p + kAhead + j);
        constexpr int most = bytes || nf4 || F == QuantFormat::int4_levels ? 128 : 15;
        dots<kGroupQuads, most>(acc, q, x.stride, [&](int h, int j) {
          const vu b = load_raw<vu>(p + (bytes ? h : h / 2) * kQuad * kPanel + j * kQuad * W);
          return decode<F>(bytes ? b : (h % 2 ? b >> 4 : b) & 0x0f0f0f0fu, part);
        });
      }
    }
    if constexpr (nf4)
      UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < V; j++) acc[i][j] += splat_int(x_sums[i * x.groups + g]);
    UNROLL for (int j = 0; j < V; j++) {
      vf scale = load(reinterpret_cast<const Scale*>(scales) + j * W);
      UNROLL for (int i = 0; i < R; i++)
        sum[i][j] = fma(to_float(acc[i][j]) * splat(x_scales[i * x.groups + g]), scale, sum[i][j]);
    }
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) store(c + i * kPanel + j * W, sum[i][j]);
}

template <int R, QuantFormat F>
INLINE void dots4(int rows, const LinearQArgs& a, const QuantRows& x, int64_t row, int64_t first,
                  int64_t end, const uint8_t* w, bool fetches, float* c) {
  if (rows == R) {
    constexpr int V = R == 1 || (W == 16 && R == 2) ? kVectors : kVectors / 2;
    for (int col = 0; col < kPanel; col += V * W)
      // The first columns prefetch the whole panel.
      dots4<R, V, F>(a, x, row, first, end, w, col, fetches && col == 0, c + col);
    return;
  }
  if constexpr (R > 1) dots4<R - 1, F>(rows, a, x, row, first, end, w, fetches, c);
}

template <QuantFormat F>
const uint8_t* codes_at(const LinearQArgs& a, int64_t panel, int64_t group) {
  return static_cast<const uint8_t*>(a.weight) +
         (panel * ceil_div(a.k, a.group) + group) * group_nbytes(a.group, F);
}

// c[rows][kPanel] += second terms of rows first ... first + rows times the panel at column col
template <QuantFormat F>
void add_outliers4(const LinearQArgs& a, const QuantRows& second, int64_t first, int64_t rows,
                   int64_t col, float* c) {
  constexpr int R = kQuantRows4;
  const uint8_t* w = codes_at<F>(a, col / kPanel, 0);
  for (int64_t i = 0; i < rows; i += R) {
    const int64_t some = min<int64_t>(R, rows - i);
    int32_t list[64];
    second.outliers.for_each(first + i, some, list, [&](int64_t count) {
      for (int64_t j = 0; j < count; j++)
        dots4<R, F>(int(some), a, second, first + i, list[j], list[j] + 1, w, i == 0, c + i * kPanel);
    });
  }
}

template <QuantFormat F, class B, class E>
INLINE void panel4(const LinearQArgs& a, const QuantRows& x, const QuantRows& second, int64_t first,
                   int64_t rows, int64_t col, float* out, B begin, E finish) {
  const uint8_t* w = codes_at<F>(a, col / kPanel, 0);
  memset(out, 0, rows * kPanel * sizeof(float));
  constexpr int64_t some = kQuantRows4;
  // Groups that stay in L1 for all rows
  const int64_t all = x.groups * group_nbytes(a.group, F), parts = rows <= 2 * some ? 1 : ceil_div(all, kGroupsNbytes);
  const int64_t stretch = ceil_div(x.groups, parts);
  for (int64_t g = 0; g < x.groups; g += stretch)
    for (int64_t i = 0; i < rows; i += some) {
      const bool last = g + stretch >= x.groups;
      const int64_t n = min(some, rows - i);
      if (last) begin_pass(i, some, rows, begin);
      dots4<kQuantRows4, F>(int(n), a, x, first + i, g, min(x.groups, g + stretch), w, i == 0,
                            out + i * kPanel);
      if (!last) continue;
      add_outliers4<F>(a, second, first + i, n, col, out + i * kPanel);
      finish(i, n);
    }
}

// Calls f with a format that has groups, as a constant.
template <class F>
INLINE void with_groups(QuantFormat format, F f) {
  switch (format) {
#define CASE(type) \
  case QuantFormat::type: return f(std::integral_constant<QuantFormat, QuantFormat::type>{});
    CASE(int4_levels) CASE(int4) CASE(int4_zeros) CASE(int8_groups) CASE(nf4)
#undef CASE
    default: return;  // linear_q takes other formats elsewhere
  }
}

#if defined(OCTAVO_TILES)
template <QuantFormat F>
void unpack_codes(const LinearQArgs& a, int64_t panel, int64_t first, int64_t count, GroupWeights& to) {
  constexpr bool bytes = F == QuantFormat::int8_groups, nf4 = F == QuantFormat::nf4;
  using Scale = std::conditional_t<bytes || nf4, float, f16>;
  const int64_t quads = a.group / kQuad;
  const uint8_t* w = codes_at<F>(a, panel, first);
  for (int64_t g = 0; g < count; g++, w += group_nbytes(a.group, F)) {
    const uint8_t* scales = w + quads * kQuad * kPanel / (bytes ? 1 : 2);
    const uint8_t* zeros = scales + kPanel * sizeof(Scale);
    for (int64_t q = 0; q < quads; q++) {
      const int64_t at = g * quads + q;
      UNROLL for (int j = 0; j < kVectors; j++) {
        const uint8_t* p = w + (bytes ? q : q / 2) * kQuad * kPanel + j * kQuad * W;
        const vu b = load_raw<vu>(p), codes = bytes ? b : (q % 2 ? b >> 4 : b) & 0x0f0f0f0fu;
        vbytes v = (vbytes)decode<F>(codes);
        if constexpr (F == QuantFormat::int4)
          v -= 8;
        else if constexpr (F == QuantFormat::int4_zeros)
          v -= (vbytes)((vu)load_zeros(zeros + j * W) * 0x01010101u);
        else
          v -= 128;
        memcpy(to.bytes[j][at], &v, sizeof v);
        if constexpr (nf4) {
          const vu low = decode<F>(codes, 1);
          memcpy(to.low[j][at], &low, sizeof low);
        }
      }
    }
    UNROLL for (int j = 0; j < kPanel; j += W) {
      store(to.scales[g] + j, load(reinterpret_cast<const Scale*>(scales) + j));
      if constexpr (bytes) store(to.terms[g] + j, to_float(128 - load_zeros(zeros + j)));
    }
  }
}

template <QuantFormat F>
GroupKernel group_kernel(int64_t group) {
  constexpr GroupTerm term = F == QuantFormat::int8_groups ? GroupTerm::offset
                             : F == QuantFormat::nf4       ? GroupTerm::low
                                                           : GroupTerm::none;
  return {group, codes_at<F>, unpack_codes<F>,
          group == 32   ? group_block<32, term>
          : group == 64 ? group_block<64, term>
                        : group_block<128, term>};
}

#endif

// ---- the product ----

template <class T>
INLINE void linear_q_typed(const LinearQArgs& a, T) {
  const QuantFormat f = a.format;
  QuantRows x;
  x.group = f == QuantFormat::int8 ? padded_k8(a.k) : a.group;
  x.groups = ceil_div(a.k, x.group);
  x.stride = padded_k8(x.groups * x.group);
  x.zero = f == QuantFormat::int4_zeros || f == QuantFormat::int8_groups ? 1
           : f == QuantFormat::nf4 ? 32768 - 257 * kCodeOffset
           : f == QuantFormat::int4 ? 8 : 128 - kCodeOffset;
  x.unit = f == QuantFormat::int4_levels ? 0.0625f : 1.0f;
  const int64_t panels = ceil_div(a.n, kPanel), some = min(a.m, kQuantChunk);
  const int64_t rows16 = ceil_div(some, 16) * 16, groups = rows16 * x.groups;  // whole tiles
  const int64_t all = rows16 * x.stride + groups * (2 * sizeof(float) + sizeof(int32_t));
  QuantRows second = x;
  second.outliers.words = ceil_div(x.groups, 64);
  x.q = static_cast<int8_t*>(scratch(2 * all + rows16 * second.outliers.words * sizeof(uint64_t)));
  second.q = x.q + all;
  QuantRows* both[] = {&x, &second};
  for (QuantRows* rows : both) {
    rows->scales = reinterpret_cast<float*>(rows->q + rows16 * x.stride);
    rows->terms = rows->scales + groups;
    rows->sums = reinterpret_cast<int32_t*>(rows->terms + groups);
  }
  second.outliers.bits = reinterpret_cast<uint64_t*>(second.q + all);
  for (int64_t row0 = 0; row0 < a.m; row0 += some) {
    const int64_t m = min(some, a.m - row0);
    const int64_t cost = panels * kVectors * m * ceil_div(a.k, kQuad);
#if defined(OCTAVO_TILES)
    x.tiled = m > (f == QuantFormat::int8 ? kVectorRows : kGroupRows);
#endif
    parallel_for(m, 4 * m * x.stride / W, [&](int64_t i) {
      const T* row = static_cast<const T*>(a.x) + (row0 + i) * a.x_stride;
      if (a.order) {
        T* gathered = static_cast<T*>(scratch(a.k * sizeof(T), 1));
        for (int64_t j = 0; j < a.k; j++) gathered[j] = row[a.order[j]];
        row = gathered;
      }
      quantize_row(row, a.k, x, second, i);
    });
#if defined(OCTAVO_TILES)
    if (x.tiled && f == QuantFormat::int8) {
      tiles8(a, x, T{}, row0, m);
      continue;
    }
    if (x.tiled) {
      const GroupRows rows{x.q, x.scales, x.terms, x.stride / kTileBytes, x.groups};
      rows.clear_padding(m);
      GroupKernel kernel;
      with_groups(f, [&](auto format) { kernel = group_kernel<decltype(format)::value>(a.group); });
      group_tiles(a, T{}, rows, row0, m, kernel,
                  [&](int64_t first, int64_t rows, int64_t col, float* c) {
                    with_groups(f, [&](auto format) {
                      add_outliers4<decltype(format)::value>(a, second, first, rows, col, c);
                    });
                  });
      continue;
    }
#endif
    for_tiles(a, T{}, row0, m, cost,
              quantized_tiles([&](int64_t first, int64_t rows, int64_t col, float* c, auto begin, auto finish) {
                if (f == QuantFormat::int8) return panel8(a, x, first, rows, col, c, begin, finish);
                with_groups(f, [&](auto format) {
                  panel4<decltype(format)::value>(a, x, second, first, rows, col, c, begin, finish);
                });
              }));
  }
}

OCTAVO_END
