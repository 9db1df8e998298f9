// The flattened batch of a step, gathered from the rows of its requests (worker/input_batch.py).
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo {

// What a step's arrays are, and where: StepArrays in worker/input_batch.py.
struct StepArrays {
  int64_t num_reqs, num_tokens;  // that there is room for
  // By request
  int32_t* query_start_loc;
  int32_t* seq_lens;
  bool* samples;  // whether all known tokens are computed, so that the next one is sampled
  int64_t* last_tokens;  // of those that sample: index of the last token in the batch
  std::vector<int32_t*> block_tables;  // [num_reqs, blocks] for each KV-cache group
  // By token
  int64_t* input_ids;
  int64_t* positions;
  std::vector<int64_t*> slot_mappings;
};

struct InputGatherer {
  const int32_t* token_ids;  // [max_num_seqs, max_model_len], by row like the rest
  int64_t max_num_seqs, max_model_len;
  const int64_t* num_tokens;
  const int64_t* num_computed_tokens;
  std::vector<const int32_t*> block_tables;  // [max_num_seqs, blocks] for each KV-cache group
  int64_t blocks, block_size;

  // counts: tokens scheduled for each request. Returns how many requests sample. Throws before it writes
  // anything if a row does not exist, or tokens lie outside a row or do not fit the step.
  int64_t run(int64_t num_reqs, const int64_t* rows, const int64_t* counts, const StepArrays& to) const {
    check(num_reqs, rows, counts, to);
    int64_t token = 0, sampling = 0;
    for (int64_t i = 0; i < num_reqs; i++) {
      const int64_t row = rows[i], first = num_computed_tokens[row], end = first + counts[i];
      to.query_start_loc[i] = int32_t(token);
      to.seq_lens[i] = int32_t(end);
      for (size_t group = 0; group < block_tables.size(); group++) {
        const int32_t* table = block_tables[group] + row * blocks;
        const int64_t used = (end + block_size - 1) / block_size;
        memcpy(to.block_tables[group] + i * blocks, table, used * sizeof(int32_t));
        int64_t* slots = to.slot_mappings[group] + token - first;
        for (int64_t p = first; p < end; p++)
          slots[p] = table[p / block_size] * block_size + p % block_size;
      }
      for (int64_t p = first; p < end; p++, token++) {
        to.input_ids[token] = token_ids[row * max_model_len + p];
        to.positions[token] = p;
      }
      to.samples[i] = end == num_tokens[row];
      if (to.samples[i]) to.last_tokens[sampling++] = token - 1;
    }
    to.query_start_loc[num_reqs] = int32_t(token);
    return sampling;
  }

 private:
  void check(int64_t num_reqs, const int64_t* rows, const int64_t* counts, const StepArrays& to) const {
    if (num_reqs > to.num_reqs)
      throw std::out_of_range(std::to_string(num_reqs) + " requests in a step for " +
                              std::to_string(to.num_reqs));
    int64_t left = to.num_tokens;
    for (int64_t i = 0; i < num_reqs; i++) {
      if (rows[i] < 0 || rows[i] >= max_num_seqs)
        throw std::out_of_range("row " + std::to_string(rows[i]) + " of " +
                                std::to_string(max_num_seqs));
      const int64_t first = num_computed_tokens[rows[i]];
      if (counts[i] < 0 || counts[i] > left || first < 0 || counts[i] > max_model_len - first)
        throw std::out_of_range(std::to_string(counts[i]) + " tokens from position " +
                                std::to_string(first) + " of " + std::to_string(max_model_len) +
                                ", and room for " + std::to_string(left) + " in the step");
      left -= counts[i];
    }
  }
};

}  // namespace octavo
