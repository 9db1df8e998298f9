// Linear layers with weights in the block types of GGUF (ggml's layouts; the llama.cpp project
// defines them), or in nvfp4: out = x * weight^T + bias. Codes, scales and minima are those of the file; x is
// quantized to signed bytes with one float32 scale for each row and 32 inputs.
//
// A weight is scale * (code - zero) or scale * table[code], for some types minus or plus a minimum.
// The types iq1_levels to iq3_s_levels are Octavo's. ggml's types iq1 to iq3 refer to grids of
// vectors; Octavo's have for each number its index in a table of levels.
// `BlockShape` describes a type. Its packed form: panels of kPanel outputs as in gemm.h; a panel is
// a list of units of 32 inputs. A unit holds
//   - its codes in bit planes: lane n of a vector belongs to output n, its bytes to four inputs (a
//     quad). A plane of 8 bits has a vector for each of the 8 quads, one of 4 bits for two quads,
//     one of 2 bits for four, one of 1 bit for eight; the first quad has the lowest bits. Types of
//     3, 5 and 6 bits have two planes, the low bits first;
//   - scales (and minima) of each group of 32 or 16 inputs, [kPanel] each.
// Super-blocks of 256 inputs begin with float16 factors of their 8 units' scales (and minima). A
// panel of nvfp4 begins with the float32 factor of each output.
//
// A block of nvfp4, as the kernels receive it, has 32 inputs: the output's factor, two scales in e4m3
// for 16 inputs each, and the codes in the order of mxfp4.
//
// For every number of rows of x, a result is the sum over groups, from first to last, in float32. The
// second terms of outliers (bytes.h) follow, from first to last, too.
#pragma once
#include "bytes.h"
#if defined(OCTAVO_TILES)
#include "group_tiles.h"
#endif

OCTAVO_BEGIN

constexpr int kUnit = 32, kUnitQuads = kUnit / kQuad;
constexpr int kSuperUnits = 8;  // units of a super-block
constexpr int kStretch = 8;  // units that are unpacked at once, for many rows

enum class BlockScale {
  half,       // float16 scale of each group
  half_min,   // float16 scale and minimum of each group; the minimum is added
  super,      // signed byte of each group, times a float16 factor
  super_min,  // likewise scale and minimum; the minimum is subtracted
  exponent,   // the power of two with this exponent (e8m0), halved
  e4m3        // number of this type for each group, times a float32 factor of the output, halved
};

struct BlockShape {
  int bits, group, zero;
  BlockScale scale;
  bool levels;  // codes are indices of a table
};

constexpr BlockShape block_shape(QuantFormat f) {
  switch (f) {
    case QuantFormat::q4_0: return {4, 32, 8, BlockScale::half, false};
    case QuantFormat::q4_1: return {4, 32, 0, BlockScale::half_min, false};
    case QuantFormat::q5_0: return {5, 32, 16, BlockScale::half, false};
    case QuantFormat::q5_1: return {5, 32, 0, BlockScale::half_min, false};
    case QuantFormat::q8_0: return {8, 32, 128, BlockScale::half, false};
    case QuantFormat::iq4_nl: return {4, 32, 128, BlockScale::half, true};
    case QuantFormat::mxfp4: return {4, 32, 12, BlockScale::exponent, true};
    case QuantFormat::q2_k: return {2, 16, 0, BlockScale::super_min, false};
    case QuantFormat::q3_k: return {3, 16, 4, BlockScale::super, false};
    case QuantFormat::q4_k: return {4, 32, 0, BlockScale::super_min, false};
    case QuantFormat::q5_k: return {5, 32, 0, BlockScale::super_min, false};
    case QuantFormat::q6_k: return {6, 16, 32, BlockScale::super, false};
    case QuantFormat::iq4_xs: return {4, 32, 128, BlockScale::super, true};
    case QuantFormat::iq1_levels: return {4, 16, 9, BlockScale::super, true};
    case QuantFormat::iq2_levels: return {4, 16, 43, BlockScale::super, true};
    case QuantFormat::iq3_xxs_levels: return {4, 32, 62, BlockScale::super, true};
    case QuantFormat::iq3_s_levels: return {4, 32, 15, BlockScale::super, true};
    case QuantFormat::nvfp4: return {4, 16, 12, BlockScale::e4m3, true};
    default: return {};
  }
}

INLINE bool is_block_type(QuantFormat f) { return f >= QuantFormat::q4_0; }

constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kMxfp4Levels[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                     0, -1, -2, -3, -4, -6, -8, -12};  // twice the numbers of e2m1
constexpr int8_t kIq1Levels[16] = {-7, 1, 9, 0, -9, -1, 7};
constexpr int8_t kIq2Levels[16] = {8, 25, 43, 0, -8, -25, -43};
constexpr int8_t kIq3XxsLevels[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                      -4, -12, -20, -28, -36, -44, -52, -62};
constexpr int8_t kIq3SLevels[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

constexpr const int8_t (&levels_of(QuantFormat f))[16] {
  switch (f) {
    case QuantFormat::mxfp4:
    case QuantFormat::nvfp4: return kMxfp4Levels;
    case QuantFormat::iq1_levels: return kIq1Levels;
    case QuantFormat::iq2_levels: return kIq2Levels;
    case QuantFormat::iq3_xxs_levels: return kIq3XxsLevels;
    case QuantFormat::iq3_s_levels: return kIq3SLevels;
    default: return kIq4Levels;
  }
}
// Zero of the bytes that dots() multiplies: signed ones have none.
constexpr int zero_of(QuantFormat f) {
  const int zero = block_shape(f).zero;
  return zero == 128 ? zero - kCodeOffset : zero;
}
template <QuantFormat F>
alignas(64) constexpr LevelBytes kBlockLevels{levels_of(F), zero_of(F)};

// Constant factor of all scales
constexpr float scale_factor(QuantFormat f) {
  switch (f) {
    case QuantFormat::iq1_levels:
    case QuantFormat::iq2_levels: return 0.125f;
    case QuantFormat::iq3_xxs_levels: return 0.25f;
    default: return 1;
  }
}

template <QuantFormat F>
struct Blocks {
  static constexpr BlockShape shape = block_shape(F);
  static constexpr int bits = shape.bits, groups = kUnit / shape.group;  // groups of a unit
  static constexpr bool super =
      shape.scale == BlockScale::super || shape.scale == BlockScale::super_min;
  static constexpr bool min =
      shape.scale == BlockScale::half_min || shape.scale == BlockScale::super_min;
  static constexpr int64_t factor_nbytes = shape.scale == BlockScale::e4m3 ? kPanel * sizeof(float) : 0;
  static constexpr int numbers = super ? kUnit * kSuperUnits : kUnit;  // numbers of a block
  static constexpr int scale_nbytes = shape.scale == BlockScale::half || shape.scale == BlockScale::half_min ? 2 : 1;
  static constexpr int64_t codes_nbytes = kPanel * kUnit * bits / 8;
  static constexpr int64_t group_nbytes = kPanel * scale_nbytes * (min ? 2 : 1);
  static constexpr int64_t unit_nbytes = codes_nbytes + groups * group_nbytes;
  static constexpr int64_t header_nbytes = super ? kPanel * 2 * (min ? 2 : 1) : 0;
  static constexpr int zero = zero_of(F), offset = shape.zero - zero;
  // True if codes are unpacked for each row of x. For many rows it is faster to store the bytes, except
  // where unpacking is as fast as loading; for rare types one way is enough. Many rows use tiles if
  // there are any.
#if defined(OCTAVO_TILES)
  static constexpr bool cheap = true;
#elif defined(OCTAVO_PAIR_SUMS)
  static constexpr bool cheap = bits == 8 || (bits == 4 && !super && !shape.levels);
#else
  static constexpr bool cheap = !super && shape.scale != BlockScale::e4m3;
#endif
  static constexpr bool always_packed =
      cheap || (F >= QuantFormat::iq1_levels && F != QuantFormat::nvfp4);
  // See dots()
  static constexpr int most = shape.zero == 128 ? 128 : shape.levels ? 2 * shape.zero : (1 << bits) - 1;

  static INLINE int64_t panel_nbytes(int64_t k) {
    return factor_nbytes + k / kUnit * unit_nbytes +
           (super ? k / (kUnit * kSuperUnits) * header_nbytes : 0);
  }
  // Position of a unit in a panel, and of its super-block
  static INLINE int64_t unit_at(int64_t unit) {
    return factor_nbytes + unit * unit_nbytes + (super ? (unit / kSuperUnits + 1) * header_nbytes : 0);
  }
  static INLINE int64_t header_at(int64_t unit) {
    return unit / kSuperUnits * (header_nbytes + kSuperUnits * unit_nbytes);
  }
};

// Moves the bits of a quad to the low bits of the bytes, and above `below`.
template <int Bits>
INLINE vu plane(const uint8_t* p, int quad, int below) {
  constexpr int per_vector = 8 / Bits;
  const vu v = load_raw<vu>(p + quad / per_vector * kPanel * kQuad);
  const int shift = quad % per_vector * Bits - below;
  const vu mask = (vu)splat_int(int32_t(0x01010101u * (((1u << Bits) - 1) << below)));
  if constexpr (Bits == 8) return v;
  return (shift >= 0 ? v >> (shift & 31) : v << (-shift & 31)) & mask;
}

// Prefetches the part of a unit that belongs to V vectors of columns.
template <int V, int64_t Nbytes>
INLINE void fetch_part(const uint8_t* unit, int col) {
  constexpr int64_t part = Nbytes * V / kVectors;
  UNROLL for (int64_t i = 0; i < part; i += 64)
    __builtin_prefetch(unit + col / (V * W) * part + i);
}

// A panel's codes and scales as they are packed.
template <QuantFormat F>
struct PackedUnits {
  using B = Blocks<F>;
  static constexpr bool min = B::min;
  const uint8_t* panel;
  int col;  // first column
  const uint8_t *header = nullptr, *unit = nullptr;

  INLINE void go_to(int64_t u) {
    unit = panel + B::unit_at(u);
    header = panel + B::header_at(u);
  }
  template <int V>
  INLINE void fetch() const {
    // The passes over a stretch for some columns each prefetch a part of the next stretch.
    fetch_part<V, B::unit_nbytes>(unit + (V == kVectors ? kAhead : kStretch * B::unit_nbytes), col);
  }
  INLINE vu codes(int quad, int j) const {
    const uint8_t* p = unit + (col + j * W) * kQuad;
    constexpr int64_t plane4 = kPanel * kUnit / 2, plane2 = kPanel * kUnit / 4;
    vu v;
    if constexpr (B::bits == 8) v = plane<8>(p, quad, 0);
    if constexpr (B::bits == 4) v = plane<4>(p, quad, 0);
    if constexpr (B::bits == 5) v = plane<4>(p, quad, 0) | plane<1>(p + plane4, quad, 4);
    if constexpr (B::bits == 6) v = plane<4>(p, quad, 0) | plane<2>(p + plane4, quad, 4);
    if constexpr (B::bits == 2) v = plane<2>(p, quad, 0);
    if constexpr (B::bits == 3) v = plane<2>(p, quad, 0) | plane<1>(p + plane2, quad, 2);
    if constexpr (B::shape.levels) return look_up(load_raw<vbytes>(kBlockLevels<F>.bytes), v);
    return v ^ (B::offset * 0x01010101u);
  }
  INLINE vf scale(int group, int j) const { return number(group, j, 0); }
  INLINE vf minimum(int group, int j) const {
    const vf m = number(group, j, 1);
    return B::super ? -m : m;
  }

 private:
  INLINE vf number(int group, int j, int second) const {
    const int at = col + j * W;
    const uint8_t* p = unit + B::codes_nbytes + group * B::group_nbytes +
                       (second * kPanel + at) * B::scale_nbytes;
    if constexpr (B::shape.scale == BlockScale::exponent) {
      // 2^(e - 128); e = 0 and 1 are subnormal
      vi e = load_zeros(p);
      return (vf)(e < 2 ? splat_int(0x00200000) << e : (e - 1) << 23);
    } else if constexpr (B::shape.scale == BlockScale::e4m3) {
      const vi code = load_zeros(p);
      const vf scale = (vf)((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f;
      return scale * load_raw<vf>(panel + at * sizeof(float)) * 0.5f;
    } else if constexpr (!B::super) {
      return widen(load_raw<vh>(p), f16{});
    } else {
      vf factor = widen(load_raw<vh>(header + (second * kPanel + at) * 2), f16{});
      if constexpr (scale_factor(F) != 1) factor *= splat(scale_factor(F));
      return to_float((load_zeros(p) ^ 128) - 128) * factor;
    }
  }
};

// Calls write(unit, quad, j, codes) for the codes of some units, and writes scales and minima.
template <QuantFormat F, class Write>
INLINE void unpack_units(const uint8_t* panel, int64_t first, int64_t count, float* scales,
                         float* minima, Write write) {
  using B = Blocks<F>;
  PackedUnits<F> from{panel, 0};
  for (int64_t u = 0; u < count; u++) {
    from.go_to(first + u);
    UNROLL for (int q = 0; q < kUnitQuads; q++)
      UNROLL for (int j = 0; j < kVectors; j++) write(u, q, j, from.codes(q, j));
    UNROLL for (int g = 0; g < B::groups; g++, scales += kPanel)
      UNROLL for (int j = 0; j < kVectors; j++) {
        store(scales + j * W, from.scale(g, j));
        if constexpr (B::min) store(minima + g * kPanel + j * W, from.minimum(g, j));
      }
    if constexpr (B::min) minima += B::groups * kPanel;
  }
}

// Units with their codes unpacked to bytes, and their scales to float32.
template <QuantFormat F>
struct UnpackedUnits {
  using B = Blocks<F>;
  static constexpr bool min = B::min;
  alignas(64) uint8_t bytes[kStretch][kUnitQuads][kPanel * kQuad];
  alignas(64) float scales[kStretch][B::groups][kPanel];
  alignas(64) float minima[min ? kStretch : 1][B::groups][kPanel];

  void fill(const uint8_t* panel, int64_t first, int64_t count) {
    unpack_units<F>(panel, first, count, scales[0][0], minima[0][0],
                    [&](int64_t u, int q, int j, vu codes) {
                      memcpy(bytes[u][q] + j * W * kQuad, &codes, sizeof codes);
                    });
  }
};

template <QuantFormat F>
struct UnpackedColumns {
  static constexpr bool min = Blocks<F>::min;
  const UnpackedUnits<F>& units;
  int col;
  int64_t first;
  const uint8_t* ahead;  // packed units that are prefetched meanwhile, or null
  int64_t unit = 0;

  INLINE void go_to(int64_t u) { unit = u - first; }
  template <int V>
  INLINE void fetch() const {
    using B = Blocks<F>;
    if (ahead) fetch_part<V, B::unit_nbytes>(ahead + unit * B::unit_nbytes, col);
  }
  INLINE vu codes(int quad, int j) const {
    return load_raw<vu>(units.bytes[unit][quad] + (col + j * W) * kQuad);
  }
  INLINE vf scale(int group, int j) const { return load(units.scales[unit][group] + col + j * W); }
  INLINE vf minimum(int group, int j) const { return load(units.minima[unit][group] + col + j * W); }
};

// Quantized rows of x.
struct ByteRows {
  int8_t* q;  // [rows][k], or tiled: [rows / 16][k / group][16][group]
  float* scales;  // [rows][k / 32], or tiled: [rows / 16][k / group][16]
  int32_t* sums;  // [rows][k / group]: sums of q; not if tiled
  float* totals;  // [rows][k / group], or tiled: [rows / 16][k / group][16]: sums times the scale
  int64_t k;
  int groups;  // groups of a unit
  bool tiled = false;
  Outliers outliers = {};  // units that are not zero; only of second terms

  int8_t* at(int64_t row, int64_t i) const {
#if defined(OCTAVO_TILES)
    if (tiled) return q + in_tiles(row, i, ceil_div(k, kTileBytes), kUnit / groups);
#endif
    return q + row * k + i;
  }
};

// Stores unit u of a row: whole numbers, times the scale
INLINE void store_unit(const vi (&numbers)[kUnit / W], float scale, const ByteRows& to, int64_t row,
                       int64_t u) {
  int32_t sums[2] = {};
  UNROLL for (int j = 0; j < kUnit / W; j++) {
    const vb b = to_bytes(numbers[j]);
    memcpy(to.at(row, u * kUnit + j * W), &b, sizeof b);
    sums[j * W / 16] += reduce_sum(numbers[j]);
  }
  if (to.groups == 1) sums[0] += sums[1];
  if (!to.tiled) to.scales[row * (to.k / kUnit) + u] = scale;
  for (int g = 0; g < to.groups; g++) {
    const int64_t groups = to.k / kUnit * to.groups, group = u * to.groups + g;
    const float total = scale * float(sums[g]);
    if (to.tiled) {
      to.scales[in_sixteens(row, group, groups)] = scale;
      to.totals[in_sixteens(row, group, groups)] = total;
    } else {
      to.sums[row * groups + group] = sums[g];
      to.totals[row * groups + group] = total;
    }
  }
}

// Quantizes a row of x, and the second terms.
template <class T>
void quantize_units(const T* x, const ByteRows& to, const ByteRows& second, int64_t row) {
  const int64_t units = to.k / kUnit, groups = units * to.groups;
  float* most = second.scales + row * units;  // until the scales are known
  for (int64_t u = 0; u < units; u++) most[u] = largest(x + u * kUnit, kUnit);
  second.outliers.mark(row, most, units);
  memset(second.at(row, 0), 0, to.k);
  memset(second.sums + row * groups, 0, groups * sizeof(int32_t));
  memset(second.totals + row * groups, 0, groups * sizeof(float));
  for (int64_t u = 0; u < units; u++, x += kUnit) {
    const vf inverse = splat(inverse_scale(most[u]));
    const float scale = byte_scale(most[u]);
    const bool outlier = second.outliers.marked(row, u);
    vi numbers[kUnit / W], errors[kUnit / W];
    UNROLL for (int j = 0; j < kUnit / W; j++) {
      const vf exact = load(x + j * W) * inverse;
      numbers[j] = round_to_int(exact);
      errors[j] = round_to_int((exact - to_float(numbers[j])) * splat(kFiner));
    }
    store_unit(numbers, scale, to, row, u);
    if (outlier)
      store_unit(errors, scale / kFiner, second, row, u);
    else
      most[u] = 0;
  }
}

// c[R][V * W] += x[R][units] * w[units][V * W], for `count` units from the first one or those of a list
template <QuantFormat F, int R, int V, class Units>
INLINE void block_dots(Units w, const ByteRows& x, int64_t row, int64_t first, int64_t count, float* c,
                       const int32_t* list) {
  using B = Blocks<F>;
  constexpr int quads = kUnitQuads / B::groups;
  const int64_t units = x.k / kUnit;
  const int8_t* q = x.q + row * x.k;
  const float* x_scales = x.scales + row * units;
  const int32_t* x_sums = x.sums + row * units * B::groups;
  const float* x_totals = x.totals + row * units * B::groups;
  vf sum[R][V];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) sum[i][j] = load(c + i * kPanel + j * W);
  for (int64_t at = 0; at < count; at++) {
    const int64_t u = list ? list[at] : first + at;
    w.go_to(u);
    if (!list) w.template fetch<V>();
    UNROLL for (int g = 0; g < B::groups; g++) {
      vi acc[R][V];
      UNROLL for (int i = 0; i < R; i++) {
        const vi s = B::zero ? splat_int(-B::zero * x_sums[(i * units + u) * B::groups + g]) : vi{};
        UNROLL for (int j = 0; j < V; j++) acc[i][j] = s;
      }
      dots<quads, B::most>(acc, q + (u * kUnit + g * quads * kQuad), x.k,
                           [&](int h, int j) { return w.codes(g * quads + h, j); });
      UNROLL for (int j = 0; j < V; j++) {
        const vf scale = w.scale(g, j);
        UNROLL for (int i = 0; i < R; i++)
          sum[i][j] = fma(to_float(acc[i][j]) * splat(x_scales[i * units + u]), scale, sum[i][j]);
        if constexpr (Units::min) {
          const vf low = w.minimum(g, j);
          UNROLL for (int i = 0; i < R; i++) {
            const vf total = splat(x_totals[(i * units + u) * B::groups + g]);
            sum[i][j] = fma(total, low, sum[i][j]);
          }
        }
      }
    }
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < V; j++) store(c + i * kPanel + j * W, sum[i][j]);
}

// Multiplies `rows` rows; `columns(col)` returns the units from a column on.
template <QuantFormat F, int R, class Columns>
void block_rows(int rows, const ByteRows& x, int64_t row, int64_t first, int64_t count, float* c,
                Columns columns, const int32_t* list = nullptr) {
  if (rows == R) {
    constexpr int V = R == 1 || (W == 16 && R == 2) ? kVectors : kVectors / 2;
    for (int col = 0; col < kPanel; col += V * W)
      block_dots<F, R, V>(columns(col), x, row, first, count, c + col, list);
    return;
  }
  if constexpr (R > 1) block_rows<F, R - 1>(rows, x, row, first, count, c, columns, list);
}

// The packed units of a panel, from a column on
template <QuantFormat F>
struct PackedColumns {
  const uint8_t* panel;
  INLINE PackedUnits<F> operator()(int col) const { return {panel, col}; }
};

template <QuantFormat F>
INLINE PackedColumns<F> packed_columns(const LinearQArgs& a, int64_t col) {
  return {static_cast<const uint8_t*>(a.weight) + col / kPanel * Blocks<F>::panel_nbytes(a.k)};
}

// c[rows][kPanel] += second terms of rows first ... first + rows times the panel at column col
template <QuantFormat F>
void add_outliers(const LinearQArgs& a, const ByteRows& second, int64_t first, int64_t rows,
                  int64_t col, float* c) {
  constexpr int R = kQuantRows4;
  const PackedColumns<F> columns = packed_columns<F>(a, col);
  for (int64_t i = 0; i < rows; i += R) {
    const int64_t some = min<int64_t>(R, rows - i);
    int32_t list[64];
    second.outliers.for_each(first + i, some, list, [&](int64_t count) {
      block_rows<F, R>(int(some), second, first + i, 0, count, c + i * kPanel, columns, list);
    });
  }
}

template <QuantFormat F>
void block_panel(const LinearQArgs& a, const ByteRows& x, const ByteRows& second, int64_t first,
                 int64_t rows, int64_t col, float* out) {
  const PackedColumns<F> columns = packed_columns<F>(a, col);
  memset(out, 0, rows * kPanel * sizeof(float));
  constexpr int R = kQuantRows4;
  const int64_t all = a.k / kUnit, passes = ceil_div(rows, R), some = ceil_div(rows, passes);
  if (passes <= 2 || Blocks<F>::always_packed) {
    const int64_t stretch = rows == 1 ? all : kStretch;  // stays in L1 for all rows and columns
    for (int64_t u = 0; u < all; u += stretch)
      for (int64_t i = 0; i < rows; i += some)
        block_rows<F, R>(int(min(some, rows - i)), x, first + i, u, min(stretch, all - u),
                         out + i * kPanel, columns);
  } else if constexpr (!Blocks<F>::always_packed) {
    UnpackedUnits<F> units;
    for (int64_t u = 0; u < all; u += kStretch) {
      const int64_t count = min<int64_t>(kStretch, all - u);
      units.fill(columns.panel, u, count);
      for (int64_t i = 0; i < rows; i += some)
        block_rows<F, R>(int(min(some, rows - i)), x, first + i, u, count, out + i * kPanel,
                         [&](int column) {
                           const uint8_t* ahead = columns.panel + Blocks<F>::unit_at(u + kStretch);
                           return UnpackedColumns<F>{units, column, u, i ? nullptr : ahead};
                         });
    }
  }
  add_outliers<F>(a, second, first, rows, col, out);
}

// Calls f with the block type as a constant.
template <class F>
INLINE void with_block_type(QuantFormat format, F f) {
  switch (format) {
#define CASE(type) \
  case QuantFormat::type: return f(std::integral_constant<QuantFormat, QuantFormat::type>{});
    CASE(q4_0) CASE(q4_1) CASE(q5_0) CASE(q5_1) CASE(q8_0) CASE(iq4_nl) CASE(mxfp4)
    CASE(q2_k) CASE(q3_k) CASE(q4_k) CASE(q5_k) CASE(q6_k) CASE(iq4_xs)
    CASE(iq1_levels) CASE(iq2_levels) CASE(iq3_xxs_levels) CASE(iq3_s_levels) CASE(nvfp4)
#undef CASE
    default: return;
  }
}

OCTAVO_END
