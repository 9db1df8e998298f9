// Changes of LoRA adapters to the products of experts. This file calls the kernels of the chosen
// variant, so it is compiled only once.
//
// A pair of a token and an expert has a row of the product. Its change is that of the pair (adapter,
// expert), so `add_lora` (lora.h) computes it with a table of these pairs. A row's bits depend on its
// own token only.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int32_t kFirst = 0;

template <class T>
T* at(const void* base, int64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + offset);
}

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

// Copies the inputs of the changed rows, times their factors.
void gather(const ExpertLoraArgs& a) {
  const int64_t chunk = std::max<int64_t>(1, a.tokens / (8 * num_threads()));
  run_parallel(a.tokens, chunk, true, [](void* context, int64_t begin, int64_t end) {
    const ExpertLoraArgs& a = *static_cast<const ExpertLoraArgs*>(context);
    const Alone alone;
    const int64_t item = size_of(a.dtype);
    for (int64_t pair = begin * a.top_k; pair < end * a.top_k; pair++) {
      const int64_t row = a.places[pair];
      if (a.pair_slots[row] < 0) continue;
      const char* x = at<char>(a.x, pair / a.top_k * a.x_stride * item);
      char* to = at<char>(a.gathered, row * a.k * item);
      if (a.factors)
        kernels().sum_experts({x, &kFirst, a.factors + pair, to, 0, 0, 1, 1, a.k, a.dtype});
      else
        memcpy(to, x, a.k * item);
    }
  }, const_cast<ExpertLoraArgs*>(&a));
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

}  // namespace octavo
