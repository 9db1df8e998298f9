// Thread pool of the process that kernels share their work with.
#pragma once
#include <cstdint>

namespace octavo {

// Runs [begin, end) of a job.
using Body = void (*)(void* context, int64_t begin, int64_t end);

// Runs [0, n) in pieces of `chunk`, which threads claim one after the other. The caller works too
// and only waits for pieces that other threads have begun, so a delayed thread delays the call only
// in that case. `wake`: wake sleeping threads; threads that are awake always take part. If the pool
// is busy with another call, the caller runs the whole job. A forked process starts its own threads
// on demand.
void run_parallel(int64_t n, int64_t chunk, bool wake, Body body, void* context);

// Time that a thread spins before it sleeps or yields its core.
int64_t spin_microseconds();
void set_spin_microseconds(int64_t time);

int num_threads();  // threads of a job, including the caller; 1 in a thread that works alone
// While one exists, kernels that its thread calls share no work with other threads.
class Alone {
 public:
  Alone();
  ~Alone();

 private:
  bool before_;
};

// Makes the calling thread work alone until its end.
void work_alone();

void set_num_threads(int n);  // 0: all cores that the process may run on

}  // namespace octavo
