// The flattened batch of a step, gathered from the rows of its requests (worker/input_batch.py).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace octavo {

// Addresses of arrays by name.
struct Addresses {
  const std::map<std::string, uintptr_t>& by_name;

  struct Pointer {
    uintptr_t address;
    template <class T>
    operator T*() const {
      return reinterpret_cast<T*>(address);
    }
  };
  Pointer operator[](const char* name) const { return {by_name.at(name)}; }
};

// Arrays of a step that are gathered; StepTable in layers/step_table.py declares all arrays.
struct StepArrays {
  int64_t tokens, requests, samples;  // capacities
  int32_t* query_start_loc;
  int32_t* seq_lens;
  int64_t* logits_indices;
  int64_t* input_ids;
  int64_t* positions;
  int64_t* slot_mappings;  // [groups, tokens]
  int32_t* block_tables;  // [groups, requests, blocks]

  StepArrays(int64_t tokens, int64_t requests, int64_t samples, const Addresses& at)
      : tokens(tokens),
        requests(requests),
        samples(samples),
        query_start_loc(at["query_start_loc"]),
        seq_lens(at["seq_lens"]),
        logits_indices(at["logits_indices"]),
        input_ids(at["input_ids"]),
        positions(at["positions"]),
        slot_mappings(at["slot_mappings"]),
        block_tables(at["block_tables"]) {}
};

struct InputGatherer {
  int64_t max_num_seqs, max_model_len, groups, blocks, block_size;
  // By row
  const int32_t* token_ids;  // [max_num_seqs, max_model_len]
  const int64_t* num_tokens;
  const int64_t* num_computed_tokens;
  const int32_t* block_tables;  // [groups, max_num_seqs, blocks]
  // By request of the step
  const int64_t* rows;
  const int64_t* counts;  // tokens to compute, drafts included
  const int64_t* num_drafts;  // tokens after the known ones
  int64_t* num_samples;  // written: rows of logits; 0: some known tokens are not computed yet

  InputGatherer(int64_t max_num_seqs, int64_t max_model_len, int64_t groups, int64_t blocks,
                int64_t block_size, const Addresses& at)
      : max_num_seqs(max_num_seqs),
        max_model_len(max_model_len),
        groups(groups),
        blocks(blocks),
        block_size(block_size),
        token_ids(at["token_ids"]),
        num_tokens(at["num_tokens"]),
        num_computed_tokens(at["num_computed_tokens"]),
        block_tables(at["block_tables"]),
        rows(at["rows"]),
        counts(at["counts"]),
        num_drafts(at["num_drafts"]),
        num_samples(at["num_samples"]) {}

  // Returns the number of rows of logits. Throws before it writes anything if a row does not exist,
  // or tokens are outside a row or exceed the step.
  int64_t run(int64_t num_reqs, const StepArrays& to) const {
    check(num_reqs, to);
    int64_t token = 0, sampled = 0;
    for (int64_t i = 0; i < num_reqs; i++) {
      const int64_t row = rows[i], first = num_computed_tokens[row], end = first + counts[i];
      to.query_start_loc[i] = int32_t(token);
      to.seq_lens[i] = int32_t(end);
      for (int64_t group = 0; group < groups; group++) {
        const int32_t* table = block_tables + (group * max_num_seqs + row) * blocks;
        const int64_t used = (end + block_size - 1) / block_size;
        memcpy(to.block_tables + (group * to.requests + i) * blocks, table, used * sizeof(int32_t));
        int64_t* slots = to.slot_mappings + group * to.tokens + token - first;
        for (int64_t p = first; p < end; p++)
          slots[p] = table[p / block_size] * block_size + p % block_size;
      }
      for (int64_t p = first; p < end; p++, token++) {
        to.input_ids[token] = token_ids[row * max_model_len + p];
        to.positions[token] = p;
      }
      num_samples[i] = samples_of(i);
      for (int64_t j = num_samples[i]; j > 0; j--) to.logits_indices[sampled++] = token - j;
    }
    to.query_start_loc[num_reqs] = int32_t(token);
    return sampled;
  }

 private:
  // Counts one sample for each draft, and one after the last draft.
  int64_t samples_of(int64_t i) const {
    const int64_t end = num_computed_tokens[rows[i]] + counts[i];
    return end == num_tokens[rows[i]] + num_drafts[i] ? num_drafts[i] + 1 : 0;
  }

  void check(int64_t num_reqs, const StepArrays& to) const {
    if (num_reqs > to.requests)
      throw std::out_of_range(std::to_string(num_reqs) + " requests in a step for " +
                              std::to_string(to.requests));
    int64_t tokens = to.tokens, samples = to.samples;
    for (int64_t i = 0; i < num_reqs; i++) {
      if (rows[i] < 0 || rows[i] >= max_num_seqs)
        throw std::out_of_range("row " + std::to_string(rows[i]) + " of " +
                                std::to_string(max_num_seqs));
      const int64_t first = num_computed_tokens[rows[i]];
      if (counts[i] < 0 || counts[i] > tokens || first < 0 || counts[i] > max_model_len - first)
        throw std::out_of_range(std::to_string(counts[i]) + " tokens from position " +
                                std::to_string(first) + " of " + std::to_string(max_model_len) +
                                ", and room for " + std::to_string(tokens) + " in the step");
      tokens -= counts[i];
      if (num_drafts[i] < 0 || samples_of(i) > std::min(counts[i], samples))
        throw std::out_of_range(std::to_string(num_drafts[i]) + " drafts among " +
                                std::to_string(counts[i]) + " tokens, and room for " +
                                std::to_string(samples) + " rows of logits in the step");
      samples -= samples_of(i);
    }
  }
};

}  // namespace octavo
