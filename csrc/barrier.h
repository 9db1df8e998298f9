// Processes that compute one model together wait for each other in memory that they share.
#pragma once
#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "kernels.h"

namespace octavo {

// The beginning of the shared memory, zeros at first; octavo/system/distributed.py knows its size.
struct SharedBarrier {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> round;  // how often all have arrived; what sleepers wait at
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> broken;  // whether nobody is to wait any more
};
static_assert(sizeof(SharedBarrier) == 256 && std::atomic<uint32_t>::is_always_lock_free);

// One of the processes will not come.
struct GroupError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct BarrierArgs {
  SharedBarrier* barrier;
  int64_t ranks;
  double timeout;  // seconds
  int64_t rows;

  void resize(const StepSize& size) { rows = size.rows; }
  Work work() const { return {0.0, 0.0}; }
};

// Waits until all ranks have arrived; what they wrote before is seen by all behind it. Throws
// GroupError when the group is broken, and breaks it where the others take longer than the timeout.
void shared_barrier(const BarrierArgs& a);

// Ends all waiting, now and later.
void break_group(SharedBarrier* barrier);

// A number in shared memory that one process makes larger and others wait for; zeros at first.
struct SharedCounter {
  alignas(64) std::atomic<uint32_t> value;
  alignas(64) std::atomic<uint32_t> sleeping;
};
static_assert(sizeof(SharedCounter) == 128);

// What was written before is seen by all who find that value. It may wrap around.
void counter_post(SharedCounter* counter, uint32_t value);

// Whether the counter has come to a value.
bool counter_reached(const SharedCounter& counter, uint32_t value);

// Waits for that. Throws GroupError when the group is broken, or after `timeout` seconds.
void counter_wait(SharedCounter* counter, uint32_t value, const SharedBarrier& group,
                  double timeout);

}  // namespace octavo
