// Changes that LoRA adapters make to rows of an embedding. A row of A^T belongs to each token, so the first
// product is a look-up.
#pragma once
#include "lora.h"

OCTAVO_BEGIN

constexpr int64_t kMaxLoraRank = 512;  // of `max_lora_rank`

void add_lora_embedding(const LoraEmbeddingArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    int64_t ranks = 0;  // of all rows
    for (int64_t row = 0; row < a.rows; row++)
      if (a.slots[row] >= 0) ranks += a.slices[a.slots[row]].rank;
    parallel_for(a.rows, ranks * a.n / W, [&](int64_t row) {
      if (a.slots[row] < 0) return;
      const LoraSlice& s = a.slices[a.slots[row]];
      const int64_t id = a.ids[row];
      if (!s.a || id < 0 || id >= a.vocab) return;
      alignas(64) float u[kMaxLoraRank];
      for (int64_t p = 0; p < s.rank; p += kLoraLanes) {
        const T* numbers = static_cast<const T*>(s.a) + p * a.vocab + id * kLoraLanes;
        for (int64_t i = 0; i < kLoraLanes; i += W) store(u + p + i, load(numbers + i) * s.scale);
      }
      T* out = static_cast<T*>(a.out) + row * a.out_stride;
      for (int64_t col = 0; col < a.n; col += kLoraPanel) {
        const T* b = static_cast<const T*>(s.b) + col * s.rank;
        expand<1, false>(u, 0, b, nullptr, s.rank, out + col, 0, min(kLoraPanel, a.n - col));
      }
    });
  });
}

OCTAVO_END
