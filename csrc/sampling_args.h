// Arguments of the kernels that read logits: probabilities, choices of tokens, and masks.
#pragma once
#include "args.h"

namespace octavo {

struct SoftmaxArgs {
  const float* x;  // [rows, dim]
  int64_t x_stride;
  float* out;  // [rows, dim], dense
  int64_t rows, dim;
  bool log;

  MEMBERS(x, x_stride, out, rows, dim, log)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {8.0 * rows * dim, 0.0}; }
};

struct ArgmaxArgs {
  const float* x;  // [rows, dim]
  int64_t x_stride;
  int64_t* out;  // [rows]
  int64_t rows, dim;

  MEMBERS(x, x_stride, out, rows, dim)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {4.0 * rows * dim, 0.0}; }
};

struct RowMaxArgs {
  const float* x;  // [rows, dim]
  int64_t x_stride;
  float* out;  // [rows]
  int64_t rows, dim;

  MEMBERS(x, x_stride, out, rows, dim)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {4.0 * rows * dim, 0.0}; }
};

// SAMPLING_ROW in octavo/kernels/base.py
struct SamplingRow {
  float temperature;  // 0: greedy
  float min_p;  // 0: all
  double top_p;  // 1: all
  uint64_t seed;  // key of the random numbers
  uint32_t position, stream;  // first half of the random numbers' counter
  int64_t top_k;  // 0: all
};

struct SampleArgs {
  const float* x;  // [rows, dim]
  int64_t x_stride;
  const SamplingRow* params;  // [rows]
  int64_t* out;  // [rows]; -1: the row has no finite maximum
  int64_t rows, dim;

  MEMBERS(x, x_stride, params, out, rows, dim)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {4.0 * rows * dim, 0.0}; }
};

struct TopKArgs {
  const float* x;  // [rows, dim]
  int64_t x_stride;
  float* values;  // [rows, k], dense: the largest first, the lower index first among equals
  int64_t* indices;  // [rows, k]
  int64_t rows, dim, k;  // NaN counts as -inf

  MEMBERS(x, x_stride, values, indices, rows, dim, k)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {4.0 * rows * dim, 0.0}; }
};

struct BitmaskArgs {
  float* x;  // [x_rows, dim]
  int64_t x_stride, x_rows;
  const int32_t* bitmask;  // [rows, ceil(dim / 32)]; bit b of word w: keep the number at 32 w + b
  int64_t bitmask_stride;
  const int64_t* indices;  // [rows]: rows of x; indices beyond x are ignored
  int64_t rows, dim;

  MEMBERS(x, x_stride, x_rows, bitmask, bitmask_stride, indices, rows, dim)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {4.0 * rows * dim, 0.0}; }
};

}  // namespace octavo
