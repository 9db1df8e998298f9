// The threads that kernels share their work with: one pool for the process.
#pragma once
#include <cstdint>

namespace octavo {

// Does [begin, end) of a job.
using Body = void (*)(void* context, int64_t begin, int64_t end);

// Does [0, n) in pieces of `chunk`, handed out as threads ask for them. The caller works too and
// waits only for pieces that others have begun, so a thread that the system delays delays nobody
// until then. `wake`: worth waking threads that sleep; those awake take part in any case. A call
// while the pool is busy with another one is done by its caller alone. A forked process starts
// threads of its own when it needs them.
void run_parallel(int64_t n, int64_t chunk, bool wake, Body body, void* context);

// How long a thread waits awake before it sleeps or leaves its core to others.
int64_t spin_microseconds();
void set_spin_microseconds(int64_t time);

int num_threads();  // how many threads work on a job, the caller included
void set_num_threads(int n);  // 0: all cores that the process may run on

}  // namespace octavo
