// The flattened batch of a step, gathered from the rows of its requests (worker/input_batch.py).
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace octavo {

// The blocks of each row in one KV-cache group, and where a step's blocks and slots go.
struct BlockTables {
  const int32_t* rows;  // [max_num_seqs, stride]
  int32_t* step;  // [max_num_seqs, stride]
  int64_t* slot_mapping;  // [max_num_batched_tokens]
};

struct InputGatherer {
  // By row
  const int32_t* token_ids;  // [max_num_seqs, max_model_len]
  int64_t max_model_len;
  const int64_t* num_tokens;
  const int64_t* num_computed_tokens;
  std::vector<BlockTables> groups;
  int64_t table_stride, block_size;
  // By request of the step
  const int64_t* rows;
  const int64_t* counts;  // tokens scheduled
  int32_t* query_start_loc;
  int32_t* seq_lens;
  bool* samples;  // whether all known tokens are computed, so that the next one is sampled
  int64_t* last_tokens;  // of those that sample: index of the last token in the batch
  // By token of the step
  int64_t* input_ids;
  int64_t* positions;

  // Returns how many requests sample.
  int64_t run(int64_t num_reqs) const {
    int64_t token = 0, sampling = 0;
    for (int64_t i = 0; i < num_reqs; i++) {
      const int64_t row = rows[i], first = num_computed_tokens[row], end = first + counts[i];
      query_start_loc[i] = int32_t(token);
      seq_lens[i] = int32_t(end);
      for (const BlockTables& group : groups) {
        const int32_t* blocks = group.rows + row * table_stride;
        const int64_t used = (end + block_size - 1) / block_size;
        memcpy(group.step + i * table_stride, blocks, used * sizeof(int32_t));
        int64_t* slots = group.slot_mapping + token - first;
        for (int64_t p = first; p < end; p++)
          slots[p] = blocks[p / block_size] * block_size + p % block_size;
      }
      for (int64_t p = first; p < end; p++, token++) {
        input_ids[token] = token_ids[row * max_model_len + p];
        positions[token] = p;
      }
      samples[i] = end == num_tokens[row];
      if (samples[i]) last_tokens[sampling++] = token - 1;
    }
    query_start_loc[num_reqs] = int32_t(token);
    return sampling;
  }
};

}  // namespace octavo
