// Changes of LoRA adapters to the products of experts. This file calls the kernels of the chosen
// variant, so it is compiled only once.
//
// A pair of a token and an expert has a row of the product. Its change is that of the pair (adapter,
// expert), so `add_lora` (lora.h) computes it with a table of these pairs. A row's bits depend on its
// own token only.
#include <algorithm>
#include <cstring>
#include <vector>

#include "expert_rows.h"
#include "pool.h"

namespace octavo {
namespace {

// Writes the index of each row's pair in the table; -1: no adapter changes the row. Returns true if
// one changes some row.
bool find_slots(const ExpertLoraArgs& a) {
  bool found = false;
  for (int64_t pair = 0; pair < a.tokens * a.top_k; pair++) {
    const int32_t slot = a.slots[pair / a.top_k];
    const int64_t index = slot < 0 ? -1 : int64_t(slot) * a.experts + a.ids[pair];
    bool changes = false;
    if (index >= 0) {
      const LoraSlice* slices = a.slices + index * a.num_slices;
      changes =
          std::any_of(slices, slices + a.num_slices, [](const LoraSlice& slice) { return slice.a; });
    }
    a.pair_slots[a.places[pair]] = changes ? int32_t(index) : -1;
    found |= changes;
  }
  return found;
}

// Calls f(pair) for all pairs of a token and an expert. Threads share the tokens.
template <class F>
void for_pairs(int64_t tokens, int64_t top_k, F f) {
  struct Call {
    F& f;
    int64_t top_k;
  } call{f, top_k};
  const int64_t chunk = std::max<int64_t>(1, tokens / (8 * num_threads()));
  run_parallel(tokens, chunk, true, [](void* context, int64_t begin, int64_t end) {
    const Call& call = *static_cast<const Call*>(context);
    const Alone alone;
    for (int64_t pair = begin * call.top_k; pair < end * call.top_k; pair++) call.f(pair);
  }, &call);
}

// Copies the inputs of the changed rows, times their factors.
void gather(const ExpertLoraArgs& a) {
  for_pairs(a.tokens, a.top_k, [&](int64_t pair) {
    const int64_t row = a.places[pair];
    if (a.pair_slots[row] >= 0)
      copy_input(a, pair, a.k, at<char>(a.gathered, row * a.k * size_of(a.dtype)));
  });
}

// Copies the rows of the experts of `share` between the two tensors.
void copy_rows(const ExpertRowsArgs& a, bool take) {
  const int64_t item = size_of(a.dtype);
  for_pairs(a.tokens, a.top_k, [&](int64_t pair) {
    if (a.share && !a.share[a.ids[pair]]) return;
    char* all = at<char>(a.all, a.places[pair] * a.all_stride * item);
    char* own = at<char>(a.own, a.own_places[pair] * a.own_stride * item);
    memcpy(take ? own : all, take ? all : own, a.n * item);
  });
}

}  // namespace

void add_expert_lora(const ExpertLoraArgs& a) {
  const int64_t rows = a.tokens * a.top_k;
  if (find_slots(a)) {
    if (a.gathered) gather(a);
    LoraArgs lora{};
    lora.x = a.gathered ? a.gathered : a.x;
    lora.x_stride = a.gathered ? a.k : a.x_stride;
    lora.out = a.out, lora.out_stride = a.out_stride;
    lora.slots = a.pair_slots, lora.slices = a.slices, lora.bounds = a.bounds;
    lora.rows = rows, lora.k = a.k, lora.num_slices = a.num_slices, lora.max_rank = a.max_rank;
    lora.dtype = lora.out_dtype = a.dtype;
    kernels().add_lora(lora);
  }
  if (!a.inner) return;
  const int64_t outputs = a.bounds[a.num_slices];
  if (a.gated == Gated::none)
    kernels().unary({a.out, a.inner, a.inner_stride, rows, outputs, 0, a.activation, a.dtype});
  else
    kernels().gated({a.out, a.out_stride, a.inner, a.inner_stride, rows, outputs / 2, a.gated, a.limit,
                     a.dtype});
}

void take_expert_rows(const ExpertRowsArgs& a) {
  std::vector<int32_t> next(a.experts + 1, 0);
  for (int64_t i = 0; i < a.tokens * a.top_k; i++) next[a.ids[i] + 1]++;
  for (int64_t expert = 0; expert < a.experts; expert++) next[expert + 1] += next[expert];
  for (int64_t i = 0; i < a.tokens * a.top_k; i++) a.own_places[i] = next[a.ids[i]]++;
  copy_rows(a, true);
}

void put_expert_rows(const ExpertRowsArgs& a) { copy_rows(a, false); }

}  // namespace octavo
