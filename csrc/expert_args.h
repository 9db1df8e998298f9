// Arguments of the kernels for mixtures of experts: routing, products, adapters and exchange of rows.
#pragma once
#include "lora_args.h"
#include "weight_args.h"

namespace octavo {

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

}  // namespace octavo
