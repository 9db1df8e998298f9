// Linear layers with plain weights: on tiles if the processor multiplies the type on them, else on
// vectors.
#pragma once
#include "gemm.h"
#if defined(OCTAVO_TILES)
#include "gemm_tiles.h"
#endif

OCTAVO_BEGIN

#if !defined(OCTAVO_TILES)
int64_t linear_scratch(int64_t, int64_t, int64_t) { return 0; }
#endif

void linear(const LinearArgs& a) {
  with_type(a.dtype, [&](auto t) {
#if defined(OCTAVO_TILES)
    if constexpr (std::is_same_v<decltype(t), bf16>)
      linear_tiles(a);
    else
#endif
      linear_typed(a, t);
  });
}

OCTAVO_END
