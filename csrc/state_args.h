// Arguments of the kernels with a recurrent state: convolutions, linear attention and state spaces.
#pragma once
#include "args.h"

namespace octavo {

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

}  // namespace octavo
