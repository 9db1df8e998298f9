// Arguments of attention and of writing its cache.
#pragma once
#include "args.h"

namespace octavo {

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

}  // namespace octavo
