// Interface of every instruction-set variant of the kernels: plain structs of pointers and sizes,
// and one table of functions. It needs neither torch nor Python: a recorded list of (function,
// arguments) is replayed for steps of any size (plan.h), so the number of rows of every struct can
// be set. OCTAVO_KERNELS lists the kernels; module.cpp makes a Python function of each, whose
// keywords are the members of its struct.
//
// Common rules. Strides count elements. Everything accumulates in float32. A result depends on its
// own row only: never on the other rows of a call, on their number, or on the number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// Storage types of the two 16-bit formats: bits only, the arithmetic is in simd.h.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Contents of a KV cache: numbers of the model's type, or bytes (kv_format.h).
enum class CacheType : int { same = 0, e4m3 = 1, e5m2 = 2, int8 = 3 };
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct i8 {
  int8_t value;
};

// oai: x * sigmoid(1.702 * x); where a gate is multiplied, the factor is up + 1 (gpt-oss)
enum class Gated : int {
  none = -1,
  silu = 0,
  gelu = 1,
  gelu_tanh = 2,
  sigmoid = 3,
  relu2 = 4,
  oai = 5,
  softplus = 6,
};
enum class Unary : int {
  none = -1,
  exp = 0,
  log = 1,
  tanh = 2,
  erf = 3,
  gelu = 4,
  gelu_tanh = 5,
  soft_cap = 6,
  relu = 7,
  scale = 8,
  clamp = 9,
  relu2 = 10,
  sigmoid = 11,
  silu = 12
};

// Size that a recorded call is set to before it runs.
struct StepSize {
  int64_t rows;  // tokens, or rows of logits
  int64_t num_reqs;
};

// Minimum data moved and computed by a call, for rooflines.
struct Work {
  double bytes, flops;
};

// Names all members of a kernel's arguments: `members` is the names, `with_members` calls f with
// references. The structured binding makes it an error to forget one.
#define MEMBERS(...)                                   \
  static constexpr const char* members = #__VA_ARGS__; \
  template <class F>                                   \
  void with_members(F f) {                             \
    { [[maybe_unused]] auto& [__VA_ARGS__] = *this; }  \
    f(__VA_ARGS__);                                    \
  }

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Returns the bytes of a key or a value of one head of one token in the cache.
inline int64_t cached_size(CacheType cache, DType dtype, int64_t head_size) {
  if (cache == CacheType::same) return head_size * size_of(dtype);
  return head_size + (cache == CacheType::int8 ? 4 : 0);
}

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

struct WriteKvArgs {
  const void* key;  // [tokens, kv_heads, head_size]
  int64_t key_stride, key_head_stride;
  const void* value;  // [tokens, kv_heads, value_size]; null: latents (attention.h); kv_heads is 1
  int64_t value_stride, value_head_stride;
  void* kv_cache;
  int64_t kv_block_stride;  // from a block to the next, in elements
  const int64_t* slot_mapping;  // [tokens]; negative: do not write
  int64_t tokens, kv_heads, head_size, value_size, block_size;  // value_size <= head_size
  DType dtype;
  CacheType cache;

  MEMBERS(key, key_stride, key_head_stride, value, value_stride, value_head_stride, kv_cache,
          kv_block_stride, slot_mapping, tokens, kv_heads, head_size, value_size, block_size, dtype, cache)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const {
    const int64_t head = head_size * size_of(dtype) + cached_size(cache, dtype, head_size);
    return {(value ? 2.0 : 1.0) * tokens * kv_heads * head, 0.0};
  }
};

struct AttentionArgs {
  const void* query;  // [tokens, heads, head_size]
  int64_t query_stride, query_head_stride;
  void* out;  // [tokens, heads, value_size]
  int64_t out_stride, out_head_stride;
  const void* kv_cache;
  int64_t kv_block_stride;  // from a block to the next, in elements
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;  // [num_reqs]; not causal: positions that the request's tokens may see
  const int32_t* block_table;  // [num_reqs, *]
  int64_t block_table_stride;
  int64_t num_reqs, heads, kv_heads, head_size, value_size, block_size;
  bool latent;  // a value is the first value_size numbers of its key
  bool causal;  // false: the step has all tokens of each request; they see its first seq_lens positions
  int64_t window;  // positions visible on a side, the query's own included; 0: all
  int64_t chunk;  // positions before the last multiple of it are invisible; 0: none
  float scale, soft_cap;  // soft_cap 0: none
  const float* alibi_slopes;  // [heads] or null
  const float* position_bias;  // [heads, 2 * bias_distance + 1] or null
  int64_t bias_distance;  // distances beyond it have the bias of the last one
  const void* query_products;  // [tokens, heads, *], of each query with the vectors of distances, or null
  const void* key_products;  // the same of the step's keys; not causal: all keys are in the step
  int64_t products_stride, products_head_stride;  // of both
  const int32_t* product_columns;  // [2 * product_distance + 1], column of each distance
  int64_t product_distance;  // distances beyond it have the column of the last one
  const void* sinks;  // [heads], logits that only join the sums of probabilities; or null
  const int32_t* ranges;  // [tokens, 2], further visible positions of each token; or null
  DType dtype;
  CacheType cache;

  MEMBERS(query, query_stride, query_head_stride, out, out_stride, out_head_stride, kv_cache,
          kv_block_stride, query_start_loc, seq_lens, block_table, block_table_stride, num_reqs, heads, kv_heads,
          head_size, value_size, block_size, latent, causal, window, chunk, scale, soft_cap, alibi_slopes,
          position_bias, bias_distance, query_products, key_products, products_stride, products_head_stride,
          product_columns, product_distance, sinks, ranges, dtype, cache)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    double keys = 0, pairs = 0;  // positions read; visible (query, position) pairs
    for (int64_t r = 0; r < num_reqs; r++) {
      const double query = query_start_loc[r + 1] - query_start_loc[r], length = seq_lens[r];
      if (!causal) {
        keys += length;
        pairs += query * (window && 2.0 * window < length ? 2.0 * window : length);
        continue;
      }
      const double most = window ? window : chunk;  // 0: all
      const double seen = most && most + query < length ? most + query : length;
      keys += seen;
      pairs += query * (seen - query / 2);
    }
    const double sizes = double(head_size + value_size);
    const double rows = double(size_of(dtype)) * sizes * query_start_loc[num_reqs] * heads;
    return {(latent ? 1 : 2) * keys * kv_heads * cached_size(cache, dtype, head_size) + rows,
            2.0 * pairs * heads * sizes};
  }
};

constexpr int kMaxTaps = 8;

// Causal convolution of each channel with its own weights.
struct CausalConvArgs {
  const void* x;  // [tokens, channels]
  int64_t x_stride;
  const void* weight;  // [channels, taps], the newest input's last
  const void* bias;  // [channels] or null
  void* out;  // [tokens, channels]; may be x
  int64_t out_stride;
  float* state;  // [slots, taps - 1, channels]: the last inputs, oldest first
  int64_t state_stride;  // from a slot to the next
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* sources;  // [num_reqs]: slot with the state before the first token; -1: zeros
  const int32_t* slots;  // [tokens]: slot that receives the state after a token; -1: none
  const int32_t* snapshots;  // [tokens]: a second one
  int64_t num_reqs, channels, taps;
  bool silu;
  DType dtype;

  MEMBERS(x, x_stride, weight, bias, out, out_stride, state, state_stride, query_start_loc, sources,
          slots, snapshots, num_reqs, channels, taps, silu, dtype)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    const int64_t tokens = query_start_loc[num_reqs];
    return {2.0 * channels * (tokens * size_of(dtype) + 4 * num_reqs * (taps - 1)),
            2.0 * tokens * channels * taps};
  }
};

// See delta_rule.h. R is the number of requests; heads are those of the values.
struct DeltaRuleArgs {
  const void *query, *key;  // [tokens, key_heads, key_size], heads dense
  const void* value;  // [tokens, heads, value_size], heads dense
  const void* decay;  // [tokens, heads], or by_channel [tokens, heads, key_size]
  const void* beta;  // [tokens, heads]
  int64_t query_stride, key_stride, value_stride, decay_stride, beta_stride;
  const float* a_log;  // [heads]
  const float* dt_bias;  // [heads], or by_channel [heads, key_size]
  float* state;  // [slots, heads, key_size, value_size]
  int64_t state_stride;
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* sources;  // [R], slot of the state before the request's first token; -1: zeros
  const int32_t *slots, *snapshots;  // [tokens], slots for the state after the token; -1: none
  void* out;  // [tokens, heads, value_size]
  int64_t out_stride, num_reqs, key_heads, heads, key_size, value_size;
  float beta_scale;
  bool by_channel;
  DType dtype;

  MEMBERS(query, key, value, decay, beta, query_stride, key_stride, value_stride, decay_stride,
          beta_stride, a_log, dt_bias, state, state_stride, query_start_loc, sources, slots, snapshots,
          out, out_stride, num_reqs, key_heads, heads, key_size, value_size, beta_scale, by_channel, dtype)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    const double matrix = double(heads * key_size * value_size), tokens = query_start_loc[num_reqs];
    const double row = 2.0 * key_heads * key_size + 2.0 * heads * value_size;
    return {8.0 * num_reqs * matrix + tokens * row * size_of(dtype), 7.0 * tokens * matrix};
  }
};

// Recurrence of Mamba-2, for each head: state = e^(dt * A) * state + B (x) (dt * x), and
// out = C * state + skip * x, with A = -e^a_log and dt = softplus(dt + dt_bias) in [dt_min, dt_max].
struct SsdArgs {
  const void* x;  // [tokens, heads, head_size], heads dense
  const void* dt;  // [tokens, heads]
  const void *b, *c;  // [tokens, groups, state_size], groups dense; each for heads / groups heads
  void* out;  // [tokens, heads, head_size], heads dense; not x
  int64_t x_stride, dt_stride, b_stride, c_stride, out_stride;
  const float *a_log, *dt_bias, *skip;  // [heads]
  float* state;  // [slots, heads, state_size, head_size]
  int64_t state_stride;  // from a slot to the next
  const int32_t *query_start_loc, *sources, *slots, *snapshots;  // as above
  int64_t num_reqs, heads, groups, head_size, state_size;
  float dt_min, dt_max;
  DType dtype;

  MEMBERS(x, dt, b, c, out, x_stride, dt_stride, b_stride, c_stride, out_stride, a_log, dt_bias, skip,
          state, state_stride, query_start_loc, sources, slots, snapshots, num_reqs, heads, groups,
          head_size, state_size, dt_min, dt_max, dtype)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    const double tokens = query_start_loc[num_reqs], numbers = double(heads) * head_size;
    return {tokens * size_of(dtype) * 2 * (numbers + groups * state_size) + 8.0 * num_reqs * numbers * state_size,
            5 * tokens * numbers * state_size};
  }
};

// Recurrence of Mamba-1, for each channel and row of its state: state = e^(dt * A) * state + B * dt * x,
// and out = (sum over rows of C * state + skip * x) * silu(gate), with A = -e^a_log and
// dt = softplus(dt + dt_bias).
struct SelectiveScanArgs {
  const void *x, *dt, *gate;  // [tokens, channels]
  const void *b, *c;  // [tokens, state_size]
  void* out;  // [tokens, channels]
  int64_t x_stride, dt_stride, gate_stride, b_stride, c_stride, out_stride;
  const float* a_log;  // [state_size, channels]
  const float *dt_bias, *skip;  // [channels]
  float* state;  // [slots, state_size, channels]
  int64_t state_stride;  // from a slot to the next
  const int32_t *query_start_loc, *sources, *slots, *snapshots;  // as above
  int64_t num_reqs, channels, state_size;
  DType dtype;

  MEMBERS(x, dt, gate, b, c, out, x_stride, dt_stride, gate_stride, b_stride, c_stride, out_stride,
          a_log, dt_bias, skip, state, state_stride, query_start_loc, sources, slots, snapshots, num_reqs,
          channels, state_size, dtype)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    const double tokens = query_start_loc[num_reqs], numbers = double(channels) * state_size;
    return {tokens * size_of(dtype) * (4.0 * channels + 2.0 * state_size) + (8.0 * num_reqs + 4) * numbers,
            7 * tokens * numbers};
  }
};

// Choice of experts for each token, in float32. A token's experts are those with the largest scores
// plus bias; of equal ones the first. NaN is never chosen if there are other numbers.
enum class Score : int { softmax = 0, sigmoid = 1, sqrt_softplus = 2, none = 3 };

struct RouteArgs {
  const float* logits;  // [tokens, experts]
  int64_t logits_stride;
  const float* bias;  // [experts] or null: added to scores for the choice, not for the weights
  const float* factors;  // [experts] or null: factors of the weights
  int32_t* ids;  // [tokens, top_k], the largest score first
  float* weights;  // [tokens, top_k]
  int64_t tokens, experts, top_k;
  int64_t groups, top_groups;  // equal parts of the experts, and number of those that are chosen
  int64_t group_best;  // number of a group's largest scores whose sum is the group's score
  Score score;
  bool softmax_chosen;  // weights are the softmax of the chosen scores
  bool renormalize;  // weights are divided by their sum + epsilon, which is `least` or more
  float tolerance;  // not 0: see `sparse_mixer_weight`
  float soft_cap;  // not 0: the logits are capped first
  float epsilon, least, scale;

  MEMBERS(logits, logits_stride, bias, factors, ids, weights, tokens, experts, top_k, groups, top_groups,
          group_best, score, softmax_chosen, renormalize, tolerance, soft_cap, epsilon, least, scale)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const { return {double(tokens) * (experts * 4 + top_k * 8), 0.0}; }
};

// Numbers of a panel of a LoRA adapter's A and B; see `PackLoraArgs`.
constexpr int64_t kLoraLanes = 16, kLoraPanel = 64;

// An adapter's change to some outputs of a linear layer. With the change d = scale * (x * A^T) * B^T, a
// result y becomes y + d, or gain * (y + d) + offset.
struct LoraSlice {
  const void* a;  // packed [rank, k]; null: no change
  const void* b;  // packed [outputs, rank]
  const float* affine;  // [panels of outputs][2][kLoraPanel]: gains and offsets; null: none
  int64_t rank;
  float scale;
};

// Adds the changes of each row's adapter to the results of a linear layer.
struct LoraArgs {
  const void* x;  // [rows, k], inputs of the layer
  int64_t x_stride;
  void* out;  // [rows, n], its results
  int64_t out_stride;
  const int32_t* slots;     // [rows], the adapter of each row; -1: none
  const LoraSlice* slices;  // [adapters, num_slices]
  const int64_t* bounds;    // [num_slices + 1], outputs that each slice changes
  int64_t rows, k, num_slices, max_rank;
  DType dtype, out_dtype;

  MEMBERS(x, x_stride, out, out_stride, slots, slices, bounds, rows, k, num_slices, max_rank, dtype, out_dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const {
    const double n = double(bounds[num_slices] - bounds[0]);
    return {rows * (size_of(dtype) * double(k) + 2.0 * size_of(out_dtype) * n),
            2.0 * rows * max_rank * (double(k) * num_slices + n)};
  }
};

// Adds the changes of each row's adapter to rows of an embedding: scale * (row `id` of A^T) * B^T.
struct LoraEmbeddingArgs {
  const int64_t* ids;  // [rows], tokens
  void* out;           // [rows, n], their embeddings
  int64_t out_stride;
  const int32_t* slots;     // [rows], the adapter of each row; -1: none
  const LoraSlice* slices;  // [adapters]
  int64_t rows, vocab, n, max_rank;
  DType dtype;

  MEMBERS(ids, out, out_stride, slots, slices, rows, vocab, n, max_rank, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {2.0 * rows * size_of(dtype) * double(n), 2.0 * rows * max_rank * double(n)}; }
};

// An adapter's own weight and bias for a layer.
struct WholeLayer {
  const void* weight;  // null: the adapter has none
  const void* bias;    // [n] or null
};

// Replaces rows of a linear layer's results: x * weight^T + bias of each row's adapter.
struct ReplaceLinearArgs {
  const void* x;  // [rows, k], inputs of the layer
  int64_t x_stride;
  void* out;  // [rows, n], its results
  int64_t out_stride;
  const int32_t* slots;      // [rows], the adapter of each row; -1: none
  const WholeLayer* layers;  // [adapters]; weights are packed as B of `PackLoraArgs`
  int64_t rows, k, n;
  DType dtype, out_dtype;

  MEMBERS(x, x_stride, out, out_stride, slots, layers, rows, k, n, dtype, out_dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {2.0 * rows * size_of(dtype) * double(k), 2.0 * rows * double(k) * double(n)}; }
};

// Replaces rows of an embedding: row `id` of the table of each row's adapter.
struct ReplaceEmbeddingArgs {
  const int64_t* ids;  // [rows], tokens
  void* out;           // [rows, n], their embeddings
  int64_t out_stride;
  const int32_t* slots;      // [rows], the adapter of each row; -1: none
  const WholeLayer* layers;  // [adapters]; weights are rows [vocab, n]
  int64_t rows, vocab, n;
  DType dtype;

  MEMBERS(ids, out, out_stride, slots, layers, rows, vocab, n, dtype)
  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {2.0 * rows * size_of(dtype) * double(n), 0.0}; }
};

// Packs a matrix [rows, cols] of a LoRA adapter in panels of rows: A in panels of kLoraLanes, B of
// kLoraPanel.
struct PackLoraArgs {
  const void* src;
  int64_t src_stride;
  void* dst;
  int64_t rows, cols, panel;
  DType src_dtype, dtype;

  MEMBERS(src, src_stride, dst, rows, cols, panel, src_dtype, dtype)
};

// Norms of the rows of a changed weight: out[i] = |w[i] + b[i] * A|, for DoRA. One thread computes them.
struct LoraNormsArgs {
  const void* w;  // [rows, k]
  int64_t w_stride;
  const float* a;  // [rank, k]
  const float* b;  // [rows, rank]
  float* out;      // [rows]
  int64_t rows, k, rank;
  DType dtype;  // of w

  MEMBERS(w, w_stride, a, b, out, rows, k, rank, dtype)
};

// Feed-forward blocks of experts: inner = act(x * up^T) or act(gate) * up, and out = inner * down^T.
// Rows of inner and out belong to pairs of a token and an expert, sorted by expert.
//
// With `slot_tokens` the tokens are those of several processes. x, ids, factors and places then have
// equal parts of `slot_size` tokens, one for each process, of which only the first tokens exist.
struct ExpertsArgs {
  const void* x;  // [tokens, hidden]
  int64_t x_stride;
  const int32_t* ids;  // [tokens, top_k]: expert of each pair
  const float* factors;  // [tokens, top_k] or null: factors of x
  int32_t* places;  // [tokens, top_k]: receives the row of each pair
  const uint64_t *up, *down;  // [experts]: addresses of packed weights, 0: another rank's; null: the
                              // whole product is left out
  const void *up_bias, *down_bias;  // [experts, outputs] of x's dtype, or null
  void* inner;  // [tokens * top_k, columns of inner]
  void* out;  // [tokens * top_k, hidden]
  int64_t inner_stride, out_stride;
  int64_t tokens, top_k, experts;
  int64_t hidden, up_outputs, down_inputs, down_outputs;
  int64_t up_group, down_group;  // as in LinearQArgs
  int64_t up_order, down_order;  // position of the order of inputs in a packed weight; 0: none
  bool up_plain, down_plain;  // weights are numbers of x's dtype
  QuantFormat up_format, down_format;  // of the others
  Gated gated;
  Unary activation;  // if not gated; none: inner has the results of the product
  float limit;  // as in LinearArgs
  DType dtype;
  int64_t* counts;  // [experts] or null: the numbers of this process's pairs are added
  const int32_t* slot_tokens;  // [slots]: tokens of each process; null: `tokens` of this one
  int64_t slots, slot_size, own_slot;
  int64_t* loads;  // [experts] or null: the numbers of all processes' pairs are added
  const int32_t* shares;  // [experts, 2] or null: of an expert that several processes have, the part of
                          // the rows that this one computes, and the number of parts

  MEMBERS(x, x_stride, ids, factors, places, up, down, up_bias, down_bias, inner, out, inner_stride,
          out_stride, tokens, top_k, experts, hidden, up_outputs, down_inputs, down_outputs, up_group,
          down_group, up_order, down_order, up_plain, down_plain, up_format, down_format, gated,
          activation, limit, dtype, counts, slot_tokens, slots, slot_size, own_slot, loads, shares)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const {
    // Each distinct expert's weights are read once; those of quantized ones count as bytes.
    const double pairs = double(tokens) * top_k, read = pairs < experts ? pairs : experts;
    const double upper = up ? double(up_outputs) * hidden : 0.0;
    const double lower = down ? double(down_outputs) * down_inputs : 0.0;
    return {read * (upper * (up_plain ? size_of(dtype) : 1) + lower * (down_plain ? size_of(dtype) : 1)),
            2.0 * pairs * (upper + lower)};
  }
};

// Adds adapters' changes to the rows of one product of `experts`. With `inner` it then applies the
// activation between the products.
struct ExpertLoraArgs {
  const void* x;  // inputs of the product: [tokens, k], or with `gathered` null [tokens * top_k, k]
  int64_t x_stride;
  const float* factors;  // [tokens, top_k] or null: factors of x
  const int32_t *ids, *places;  // [tokens, top_k]: as in ExpertsArgs
  const int32_t* slots;      // [tokens]: the adapter of each token; -1: none
  const LoraSlice* slices;   // [adapters, experts, num_slices]
  const int64_t* bounds;     // [num_slices + 1], outputs that each slice changes
  int32_t* pair_slots;  // [tokens * top_k]: memory
  void* gathered;       // [tokens * top_k, k]: memory; null: x has a row for each pair
  void* out;            // [tokens * top_k, outputs]: results of the product
  void* inner;          // [tokens * top_k, columns of inner] or null: receives the activated results
  int64_t out_stride, inner_stride;  // out is dense if it is activated
  int64_t tokens, top_k, experts, k, num_slices, max_rank;
  Gated gated;
  Unary activation;  // if not gated
  float limit;       // as in LinearArgs
  DType dtype;

  MEMBERS(x, x_stride, factors, ids, places, slots, slices, bounds, pair_slots, gathered, out, inner,
          out_stride, inner_stride, tokens, top_k, experts, k, num_slices, max_rank, gated, activation,
          limit, dtype)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const {
    const double rows = double(tokens) * top_k, n = double(bounds[num_slices]);
    return {rows * size_of(dtype) * (double(k) + 2.0 * n), 2.0 * rows * max_rank * (double(k) * num_slices + n)};
  }
};

// Copies rows of pairs of this process's tokens from those of several processes, or to these. The rows
// of this process are sorted by expert and then by token.
struct ExpertRowsArgs {
  void* all;  // rows of the pairs of all processes
  void* own;  // [tokens * top_k, n]
  int64_t all_stride, own_stride;
  const int32_t *ids, *places;  // [tokens, top_k]: expert of each pair, and its row of `all`
  int32_t* own_places;  // [tokens, top_k]: its row of `own`, which take_expert_rows computes
  const int32_t* share;  // [experts] or null: 0 for experts whose rows are left out
  int64_t tokens, top_k, experts, n;
  DType dtype;

  MEMBERS(all, own, all_stride, own_stride, ids, places, own_places, share, tokens, top_k, experts, n,
          dtype)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const { return {2.0 * tokens * top_k * n * size_of(dtype), 0.0}; }
};

// Copies the input of `experts` to this process's part of the memory of several processes.
struct SendTokensArgs {
  const void* x;  // [tokens, hidden]
  int64_t x_stride;
  const int32_t* ids;  // [tokens, top_k]
  const float* factors;  // [tokens, top_k] or null
  void* x_out;  // [tokens, hidden]
  int32_t* ids_out;
  float* factors_out;
  int32_t* tokens_out;  // receives the number of tokens
  int64_t tokens, hidden, top_k;
  DType dtype;

  MEMBERS(x, x_stride, ids, factors, x_out, ids_out, factors_out, tokens_out, tokens, hidden, top_k,
          dtype)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const { return {2.0 * tokens * hidden * size_of(dtype), 0.0}; }
};

// out = the sum of a token's rows of x times their weights, from first to last.
struct SumExpertsArgs {
  const void* x;  // [tokens * top_k, dim]; with slots, the rows of all processes
  const int32_t* places;  // [tokens, top_k]: rows of x
  const float* weights;  // [tokens, top_k], or null: 1
  void* out;  // [tokens, dim]
  int64_t x_stride, out_stride, tokens, top_k, dim;
  DType dtype;

  MEMBERS(x, places, weights, out, x_stride, out_stride, tokens, top_k, dim, dtype)
  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const { return {double(size_of(dtype)) * tokens * dim * (top_k + 1), 2.0 * tokens * top_k * dim}; }
};

// x + (previous - x) * mix, for each of several mixes; previous: the request's previous token.
struct TokenShiftArgs {
  const void* x;  // [tokens, channels]
  int64_t x_stride;
  const float* mix;  // [mixes, channels]
  void* out;         // [tokens, mixes, channels]
  int64_t out_stride;
  float* state;  // [slots, channels]: the last token
  int64_t state_stride;
  const int32_t *query_start_loc, *sources, *slots, *snapshots;  // as above
  int64_t num_reqs, channels, mixes;
  DType dtype;

  MEMBERS(x, x_stride, mix, out, out_stride, state, state_stride, query_start_loc,
          sources, slots, snapshots, num_reqs, channels, mixes, dtype)
  void resize(const StepSize& size) { num_reqs = size.num_reqs; }
  Work work() const {
    const double tokens = query_start_loc[num_reqs];
    return {channels * (tokens * size_of(dtype) * (1 + mixes) + 8.0 * num_reqs), 2.0 * tokens * channels * mixes};
  }
};

// See wkv7.h. Rows have heads * size numbers; heads are dense.
struct Wkv7Args {
  const void *receptance, *decay, *key, *value, *rate, *gate;  // [tokens, heads, size]
  const void *first_value, *value_rate;  // the same, or null
  int64_t receptance_stride, decay_stride, key_stride, value_stride, rate_stride, gate_stride;
  int64_t first_value_stride, value_rate_stride;
  const float *removal, *key_rate, *bonus, *weight, *bias;  // [heads, size]
  float* state;  // [slots, heads, size, size]
  int64_t state_stride;
  const int32_t *query_start_loc, *sources, *slots, *snapshots;  // as above
  void* out;  // [tokens, heads, size]
  int64_t out_stride, num_reqs, heads, size;
  float eps;
  DType dtype;

  MEMBERS(receptance, decay, key, value, rate, gate, first_value, value_rate, receptance_stride,
          decay_stride, key_stride, value_stride, rate_stride, gate_stride, first_value_stride,
          value_rate_stride, removal, key_rate, bonus, weight, bias, state, state_stride,
          query_start_loc, sources, slots, snapshots, out, out_stride, num_reqs, heads, size, eps, dtype)
  void resize(const StepSize& step) { num_reqs = step.num_reqs; }
  Work work() const {
    const double row = double(heads) * size, tokens = query_start_loc[num_reqs];
    return {8.0 * num_reqs * row * size + 9 * tokens * row * size_of(dtype), 9.0 * tokens * row * size};
  }
};

// Every kernel, with its arguments.
#define OCTAVO_KERNELS(KERNEL)            \
  KERNEL(pack_weight, PackArgs)           \
  KERNEL(linear, LinearArgs)              \
  KERNEL(head_linear, HeadLinearArgs)     \
  KERNEL(quantize_weight, QuantizeArgs)   \
  KERNEL(pack_quant, PackQuantArgs)       \
  KERNEL(linear_q, LinearQArgs)           \
  KERNEL(pack_blocks, PackBlocksArgs)     \
  KERNEL(rms_norm, RmsNormArgs)           \
  KERNEL(layer_norm, LayerNormArgs)       \
  KERNEL(rms, RmsArgs)                    \
  KERNEL(cutoff, CutoffArgs)              \
  KERNEL(gated, GatedArgs)                \
  KERNEL(unary, UnaryArgs)                \
  KERNEL(xielu, XieluArgs)                \
  KERNEL(clip, ClipArgs)                  \
  KERNEL(rotary, RotaryArgs)              \
  KERNEL(softmax, SoftmaxArgs)            \
  KERNEL(argmax, ArgmaxArgs)              \
  KERNEL(row_max, RowMaxArgs)             \
  KERNEL(sample, SampleArgs)              \
  KERNEL(top_k, TopKArgs)                 \
  KERNEL(apply_bitmask, BitmaskArgs)      \
  KERNEL(gather, GatherArgs)              \
  KERNEL(gather_blocks, GatherBlocksArgs) \
  KERNEL(add, AddArgs)                    \
  KERNEL(multiply, MultiplyArgs)          \
  KERNEL(sum_parts, SumPartsArgs)         \
  KERNEL(write_kv, WriteKvArgs)           \
  KERNEL(attention, AttentionArgs)        \
  KERNEL(causal_conv, CausalConvArgs)     \
  KERNEL(gated_delta_rule, DeltaRuleArgs) \
  KERNEL(ssd, SsdArgs)                    \
  KERNEL(route, RouteArgs)                \
  KERNEL(experts, ExpertsArgs)            \
  KERNEL(send_tokens, SendTokensArgs)     \
  KERNEL(sum_experts, SumExpertsArgs)    \
  KERNEL(token_shift, TokenShiftArgs)     \
  KERNEL(wkv7, Wkv7Args)                  \
  KERNEL(pack_lora, PackLoraArgs)         \
  KERNEL(add_lora, LoraArgs)              \
  KERNEL(lora_norms, LoraNormsArgs)       \
  KERNEL(add_lora_embedding, LoraEmbeddingArgs) \
  KERNEL(replace_linear, ReplaceLinearArgs) \
  KERNEL(replace_embedding, ReplaceEmbeddingArgs) \
  KERNEL(add_expert_lora, ExpertLoraArgs) \
  KERNEL(take_expert_rows, ExpertRowsArgs) \
  KERNEL(put_expert_rows, ExpertRowsArgs) \
  KERNEL(selective_scan, SelectiveScanArgs)

struct KernelTable {
  const char* isa;
  int panel;  // columns in a panel of a packed weight
  // Maximum bytes of the threads' buffers for tiles of products, for the given rows and inputs.
  int64_t (*linear_scratch)(int64_t rows, int64_t k, int64_t threads);
#define KERNEL(name, Args) void (*name)(const Args&);
  OCTAVO_KERNELS(KERNEL)
#undef KERNEL
};

constexpr int kMaxHeadSize = 576;  // a multiple of 2 * W

// Shared by the variants, compiled once for the baseline processor (dispatch.cpp).

// Settings for the machine; they change the speed, never the results. octavo/kernels/tuning.py sets
// them while no kernel runs.
struct Tuning {
  bool past_caches;  // prefetch weights that are used once past the caches (prefetchnta)
  int64_t grain;     // vector operations worth sharing; five times this number is worth waking a thread
};
extern Tuning tuning;

// Returns a buffer of the calling thread, 64-byte aligned, kept for the next call; each thread has
// four. Kernels use the first three, `experts` the last.
void* scratch(size_t bytes, int which = 0);

void sort_descending(uint64_t* keys, int64_t count);

void top_k(const TopKArgs& a);
void experts(const ExpertsArgs& a);
void add_expert_lora(const ExpertLoraArgs& a);
void take_expert_rows(const ExpertRowsArgs& a);
void put_expert_rows(const ExpertRowsArgs& a);
void send_tokens(const SendTokensArgs& a);

}  // namespace octavo
