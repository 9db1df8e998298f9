// Rows of pairs of a token and an expert, for the files that call the kernels of the chosen variant.
#pragma once
#include <cstring>

#include "dispatch.h"

namespace octavo {

template <class T>
T* at(const void* base, int64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + offset);
}

// Copies the input of a pair, times its factor: `width` numbers of a row of a.x.
template <class Args>
void copy_input(const Args& a, int64_t pair, int64_t width, void* to) {
  constexpr int32_t kFirst = 0;
  const char* x = at<char>(a.x, pair / a.top_k * a.x_stride * size_of(a.dtype));
  if (a.factors)
    kernels().sum_experts({x, &kFirst, a.factors + pair, to, 0, 0, 1, 1, width, a.dtype});
  else
    memcpy(to, x, width * size_of(a.dtype));
}

}  // namespace octavo
