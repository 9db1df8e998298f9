// Arguments of the kernels that read or write weights: packing, products, and rows of tables.
#pragma once
#include "args.h"

namespace octavo {

struct PackArgs {
  const void* src;  // [rows, k]
  int64_t src_stride;
  void* dst;  // the whole packed weight
  int64_t row0, rows;  // range of its n rows
  int64_t n, k;
  DType src_dtype, dtype;

  MEMBERS(src, src_stride, dst, row0, rows, n, k, src_dtype, dtype)
};

struct LinearArgs {
  const void* x;  // [m, k]
  int64_t x_stride;
  const void* weight;  // packed, of x's dtype
  const void* bias;  // [n] of x's dtype, or null
  void* out;  // [m, n], or gated: [m, n / 2]
  int64_t out_stride;
  int64_t m, n, k;
  int64_t first_panel, num_panels;  // panels of outputs (gated: of gates) to compute; 0: all
  Gated gated;  // act(gate) * up of the halves, of whole panels and of x's dtype
  float limit;  // gated: bound of gates from above, and of up; 0: none
  Unary activation;  // of the result, not gated and of x's dtype: none, gelu, gelu_tanh, relu or silu
  DType dtype, out_dtype;

  MEMBERS(x, x_stride, weight, bias, out, out_stride, m, n, k, first_panel, num_panels, gated, limit,
          activation, dtype, out_dtype)
  void resize(const StepSize& size) { m = size.rows; }
  Work work() const {
    const int64_t width = gated == Gated::none ? n : n / 2;
    return {double(size_of(dtype)) * (n * k + m * k) + double(size_of(out_dtype)) * m * width,
            2.0 * m * n * k};
  }
};

// A product for each head: out[i][h] = x[i][h] * weight[h]^T.
struct HeadLinearArgs {
  const void* x;  // [rows, heads, k]
  int64_t x_stride, x_head_stride;
  const void* weight;  // [heads * n, k], packed, of x's dtype
  void* out;  // [rows, heads, n]
  int64_t out_stride, out_head_stride;
  int64_t rows, heads, n, k;
  DType dtype;

  MEMBERS(x, x_stride, x_head_stride, weight, out, out_stride, out_head_stride, rows, heads, n, k, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const {
    return {double(size_of(dtype)) * heads * (n * k + rows * (n + k)), 2.0 * rows * heads * n * k};
  }
};

// Encoding of a quantized weight, see quant.h; from q4_0 on: block types of GGUF, and nvfp4, see
// blocks.h; fp8: see fp8.h.
enum class QuantFormat : int {
  int8 = 0,
  int4_levels = 1,
  int4 = 2,
  int4_zeros = 3,
  int8_groups = 4,
  fp8 = 5,
  nf4 = 6,
  q4_0 = 7,
  q4_1 = 8,
  q5_0 = 9,
  q5_1 = 10,
  q8_0 = 11,
  iq4_nl = 12,
  mxfp4 = 13,
  q2_k = 14,
  q3_k = 15,
  q4_k = 16,
  q5_k = 17,
  q6_k = 18,
  iq4_xs = 19,
  iq1_levels = 20,
  iq2_levels = 21,
  iq3_xxs_levels = 22,
  iq3_s_levels = 23,
  nvfp4 = 24
};

struct QuantizeArgs {
  const void* src;  // [rows, k]
  int64_t src_stride;
  void* dst;  // the whole packed weight
  int64_t row0, rows;  // range of its n rows
  int64_t n, k, group;
  QuantFormat format;  // int8, int4_levels or fp8
  DType dtype;

  MEMBERS(src, src_stride, dst, row0, rows, n, k, group, format, dtype)
};

struct PackQuantArgs {
  const uint8_t* codes;  // [rows, k]
  const float* scales;  // [rows, groups]: 1 if the group is 0, else ceil(k / group); for 4 bits float16 numbers
  const uint8_t* zeros;  // [rows, groups]; int4_zeros and int8_groups only
  void* dst;  // as above
  int64_t row0, rows;
  int64_t n, k, group;
  QuantFormat format;

  MEMBERS(codes, scales, zeros, dst, row0, rows, n, k, group, format)
};

struct PackBlocksArgs {
  const void* src;  // [rows, src_stride bytes]: blocks of a file
  int64_t src_stride;
  void* dst;  // the whole packed weight
  int64_t row0, rows;  // range of its n rows
  int64_t n, k;
  QuantFormat format;  // a block type

  MEMBERS(src, src_stride, dst, row0, rows, n, k, format)
};

struct LinearQArgs {
  const void* x;  // [m, k]
  int64_t x_stride;
  const void* weight;  // packed
  const int32_t* order;  // [k] or null: the column of x for each input of the weight; not for block types
  const void* bias;  // [n] of x's dtype, or null
  void* out;  // as above
  int64_t out_stride;
  int64_t m, n, k, group;
  int64_t first_panel, num_panels;  // as above
  QuantFormat format;
  Gated gated;
  float limit;  // as above
  Unary activation;
  DType dtype, out_dtype;

  MEMBERS(x, x_stride, weight, order, bias, out, out_stride, m, n, k, group, first_panel, num_panels,
          format, gated, limit, activation, dtype, out_dtype)
  void resize(const StepSize& size) { m = size.rows; }
  Work work() const {
    // Bytes of a number; of block types those of a block before it is packed
    constexpr double kBlocks[] = {4.5,  5,   5.5, 6,      8.5,  4.5,    4.25,   2.625, 3.4375,
                                  4.5, 5.5, 6.5625, 4.25, 4.5625, 4.5625, 4.3125, 4.3125, 4.5};
    const double scale = 2 + (format == QuantFormat::int4_zeros);
    const double weight = format == QuantFormat::int8    ? 1.0
                          : format == QuantFormat::int8_groups ? 1.0 + 5.0 / double(group)
                          : format == QuantFormat::nf4 ? 0.5 + 4.0 / double(group)
                          : format == QuantFormat::fp8   ? 1.0 + (group ? 4.0 / double(group) : 0.0)
                          : format >= QuantFormat::q4_0 ? kBlocks[int(format) - int(QuantFormat::q4_0)] / 8
                                                        : 0.5 + scale / double(group);
    const int64_t width = gated == Gated::none ? n : n / 2;
    return {weight * n * k + double(size_of(dtype)) * m * k + double(size_of(out_dtype)) * m * width,
            2.0 * m * n * k};
  }
};

struct GatherArgs {
  const void* table;  // [n, dim], or a packed weight of that shape
  int64_t table_stride, n;
  const int64_t* ids;  // [rows]; ids outside of [0, n) yield a row of NaN
  void* out;  // [rows, dim], dense
  int64_t rows, dim;
  bool packed;
  DType dtype;

  MEMBERS(table, table_stride, n, ids, out, rows, dim, packed, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 2, 0.0}; }
};

struct GatherBlocksArgs {
  const void* table;  // packed blocks [n, dim]
  int64_t n;
  const int64_t* ids;  // as above
  void* out;  // [rows, dim], dense
  int64_t rows, dim;
  QuantFormat format;
  DType dtype;

  MEMBERS(table, n, ids, out, rows, dim, format, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 1.5, 0.0}; }
};

}  // namespace octavo
