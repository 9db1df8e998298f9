// Synchronization by shared memory of the processes that compute one model together.
#pragma once
#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "kernels.h"

namespace octavo {

// Beginning of the shared memory, initially zero; octavo/system/distributed.py knows its size.
struct SharedBarrier {
  alignas(64) std::atomic<uint32_t> arrived;
  // Two for each completed round, and one if the group is broken; sleepers wait at it. So a rank that
  // leaves late still knows that its round was completed.
  alignas(64) std::atomic<uint32_t> round;
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> broken;  // 1: all waiting ends
};
static_assert(sizeof(SharedBarrier) == 256 && std::atomic<uint32_t>::is_always_lock_free);

struct SharedCounter;

// Error: one of the processes will not arrive.
struct GroupError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct BarrierArgs {
  SharedBarrier* barrier;
  SharedCounter* arrivals;  // of this rank; may be null
  int64_t ranks;
  double timeout;  // seconds
  int64_t rows;

  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {0.0, 0.0}; }
};

// Waits until all ranks have arrived; memory that they wrote before is then visible to all. Throws
// GroupError if the group is broken before that, and breaks it if the others exceed the timeout.
void shared_barrier(const BarrierArgs& a);

// Ends all present and future waiting.
void break_group(SharedBarrier* barrier);

// Makes a broken barrier usable again, while no process waits at it.
void mend_group(SharedBarrier* barrier);

// Counter in shared memory that one process increases and others wait for; initially zero.
struct SharedCounter {
  alignas(64) std::atomic<uint32_t> value;
  alignas(64) std::atomic<uint32_t> sleeping;
};
static_assert(sizeof(SharedCounter) == 128);

// Memory written before is visible to all processes that read this value. It may wrap around.
void counter_post(SharedCounter* counter, uint32_t value);

// Returns true if the counter has reached a value.
bool counter_reached(const SharedCounter& counter, uint32_t value);

// Waits until the counter has reached a value. Throws GroupError if the group is broken, or after
// `timeout` seconds.
void counter_wait(SharedCounter* counter, uint32_t value, const SharedBarrier& group,
                  double timeout);

}  // namespace octavo
