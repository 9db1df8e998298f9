// Arguments of the kernels for adapters: changes of a layer's results, and layers of their own.
#pragma once
#include "args.h"

namespace octavo {

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

}  // namespace octavo
