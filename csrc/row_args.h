// Arguments of the kernels that change rows of numbers: norms, activations, rotary positions, sums.
#pragma once
#include "args.h"

namespace octavo {

struct RmsNormArgs {
  const void* x;  // [rows, heads, dim]
  int64_t x_stride, x_head_stride;
  const void* residual;  // [rows, dim] or null: added to x first
  void* residual_out;  // [rows, dim]: the sum
  int64_t residual_stride;  // of both
  const void* weight;  // [dim]
  void* out;  // [rows, heads, dim]
  int64_t out_stride, out_head_stride;
  int64_t rows, heads, dim;
  float eps, weight_offset;
  DType dtype;

  MEMBERS(x, x_stride, x_head_stride, residual, residual_out, residual_stride, weight, out,
          out_stride, out_head_stride, rows, heads, dim, eps, weight_offset, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const {
    return {double(size_of(dtype)) * rows * heads * dim * (residual ? 4 : 2), 0.0};
  }
};

struct LayerNormArgs {
  const void* x;  // [rows, dim]
  int64_t x_stride;
  const void* residual;  // [rows, dim] or null: added to x first
  void* residual_out;  // [rows, dim]: the sum
  int64_t residual_stride;  // of both
  const void* weight;  // [dim]
  const void* bias;  // [dim] or null
  void* out;  // [rows, dim]
  int64_t out_stride, rows, dim;
  float eps, weight_offset;
  DType dtype;

  MEMBERS(x, x_stride, residual, residual_out, residual_stride, weight, bias, out, out_stride, rows, dim,
          eps, weight_offset, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const {
    return {double(size_of(dtype)) * rows * dim * (residual ? 4 : 2), 0.0};
  }
};

// Root mean square of each row, or its inverse, as one number of the row's type.
struct RmsArgs {
  const void* x;  // [rows, dim]
  void* out;  // [rows, 1]
  int64_t x_stride, rows, dim;
  float least;  // lower bound of the mean square
  bool inverse;
  DType dtype;

  MEMBERS(x, out, x_stride, rows, dim, least, inverse, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim, 0.0}; }
};

// max(0, x - mean - multiplier * standard deviation) of each row.
struct CutoffArgs {
  const void* x;  // [rows, dim]
  void* out;  // [rows, dim]
  int64_t x_stride, out_stride, rows, dim;
  float multiplier;
  DType dtype;

  MEMBERS(x, out, x_stride, out_stride, rows, dim, multiplier, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 2, 0.0}; }
};

struct GatedArgs {
  const void* x;  // [rows, 2 * dim]: gate, then up
  int64_t x_stride;
  void* out;  // [rows, dim]
  int64_t out_stride, rows, dim;
  Gated kind;
  float limit;  // bound of gates from above, and of up; 0: none
  DType dtype;

  MEMBERS(x, x_stride, out, out_stride, rows, dim, kind, limit, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 3, 0.0}; }
};

struct UnaryArgs {
  const void* x;  // [rows, dim], dense
  void* out;
  int64_t out_stride, rows, dim;
  float param;  // soft_cap: the cap; scale: the factor; clamp: the largest magnitude
  Unary kind;
  DType dtype;

  MEMBERS(x, out, out_stride, rows, dim, param, kind, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 2, 0.0}; }
};

struct XieluArgs {
  const void* x;  // [rows, dim], dense
  void* out;
  int64_t out_stride, rows, dim;
  const void* alphas;  // [2], for positive and negative numbers
  DType dtype;

  MEMBERS(x, out, out_stride, rows, dim, alphas, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 2, 0.0}; }
};

struct ClipArgs {
  const void* x;  // [rows, dim]
  int64_t x_stride;
  void* out;  // may be x
  int64_t out_stride, rows, dim;
  const float* bounds;  // [2], the least and the largest number
  DType dtype;

  MEMBERS(x, x_stride, out, out_stride, rows, dim, bounds, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 2, 0.0}; }
};

struct RotaryArgs {
  const int64_t* positions;  // [tokens]
  void* query;  // [tokens, heads, >= rotary_dim], changed in place
  int64_t query_stride, query_head_stride, query_heads;
  void* key;  // the same for keys
  int64_t key_stride, key_head_stride, key_heads;
  const float* cos_sin;  // [max_position, rotary_dim]: cosines, then sines
  int64_t tokens, rotary_dim;
  bool is_neox;
  DType dtype;

  MEMBERS(positions, query, query_stride, query_head_stride, query_heads, key, key_stride,
          key_head_stride, key_heads, cos_sin, tokens, rotary_dim, is_neox, dtype)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const {
    return {double(size_of(dtype)) * tokens * (query_heads + key_heads) * rotary_dim * 2, 0.0};
  }
};

struct AddArgs {
  const void *x, *y;  // [rows, dim]
  void* out;
  int64_t x_stride, y_stride, out_stride, rows, dim;
  DType dtype;

  MEMBERS(x, y, out, x_stride, y_stride, out_stride, rows, dim, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * dim * 3, 0.0}; }
};

// x * act(factor).
struct MultiplyArgs {
  const void *x, *factor;  // [rows, heads, dim]; the factor's steps may be 0
  void* out;
  int64_t x_stride, x_head_stride;
  int64_t factor_stride, factor_head_stride, factor_step;  // the step is 1, or 0: one number
  int64_t out_stride, out_head_stride, rows, heads, dim;
  Gated kind;
  DType dtype;

  MEMBERS(x, factor, out, x_stride, x_head_stride, factor_stride, factor_head_stride, factor_step,
          out_stride, out_head_stride, rows, heads, dim, kind, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {double(size_of(dtype)) * rows * heads * dim * 3, 0.0}; }
};

// Sum of the partial results of several ranks, always in the same order.
struct SumPartsArgs {
  const float* x;  // [rows, parts, dim]
  const void* bias;  // [dim], may be null; added last
  void* out;  // [rows, dim]
  int64_t x_stride, out_stride, rows, parts, dim;
  DType dtype;  // of bias and out

  MEMBERS(x, bias, out, x_stride, out_stride, rows, parts, dim, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const {
    return {double(rows * dim) * (4.0 * parts + size_of(dtype)), double(rows * dim * parts)};
  }
};

}  // namespace octavo
