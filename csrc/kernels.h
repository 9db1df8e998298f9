// Interface of every instruction-set variant of the kernels: plain structs of pointers and sizes,
// and one table of functions. It needs neither torch nor Python: a recorded list of (function,
// arguments) is replayed for steps of any size (plan.h), so the number of rows of every struct can
// be set. OCTAVO_KERNELS lists the kernels; module.cpp makes a Python function of each, whose
// keywords are the members of its struct.
//
// Common rules. Strides count elements. Everything accumulates in float32. A result depends on its
// own row only: never on the other rows of a call, on their number, or on the number of threads.
#pragma once
#include "attention_args.h"
#include "expert_args.h"
#include "lora_args.h"
#include "row_args.h"
#include "sampling_args.h"
#include "state_args.h"
#include "weight_args.h"

namespace octavo {

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
