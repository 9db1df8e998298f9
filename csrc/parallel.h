// Loops that share their work among the threads of the process (pool.h).
#pragma once
#include "pool.h"
#include "simd.h"

OCTAVO_BEGIN

// Calls f(begin, end) for pieces of [0, n) on the threads of the process. `cost` is the approximate
// number of vector operations in all: a few microseconds' work is not worth sharing, and ten are
// not worth waking another thread.
template <class F>
inline void parallel_ranges(int64_t n, int64_t cost, F f) {
  const int64_t threads = cost < tuning.grain ? 1 : min<int64_t>(n, num_threads());
  const Body piece = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<F*>(context))(begin, end);
  };
  if (threads <= 1) return piece(&f, 0, n);
  run_parallel(n, max<int64_t>(1, n / (threads * 8)), cost >= 5 * tuning.grain, piece, &f);
}

// Calls f(0) ... f(n - 1) like parallel_ranges. f may accept a second argument, the next index of
// the same thread, or -1 if that is unknown.
template <class F>
inline void parallel_for(int64_t n, int64_t cost, F f) {
  parallel_ranges(n, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      if constexpr (std::is_invocable_v<F&, int64_t, int64_t>)
        f(i, i + 1 < end ? i + 1 : -1);
      else
        f(i);
  });
}

OCTAVO_END
