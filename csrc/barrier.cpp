#include "barrier.h"

#include <chrono>
#include <climits>
#include <ctime>
#include <string>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pool.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// Parts of SharedBarrier::round.
constexpr uint32_t kBroken = 1, kRound = 2;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The futexes are not private ones: other processes wait at them.
void sleep_at(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
#if defined(__linux__)
  timespec time{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &time, nullptr, 0);
#else
  (void)word, (void)value, (void)seconds;
  std::this_thread::yield();
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

void break_group(SharedBarrier* barrier) {
  barrier->broken.store(1);
  barrier->round.fetch_or(kBroken);
  wake(barrier->round);
}

void mend_group(SharedBarrier* barrier) {
  barrier->arrived.store(0);
  barrier->round.fetch_and(~kBroken);
  barrier->broken.store(0);
}

void shared_barrier(const BarrierArgs& a) {
  SharedBarrier& b = *a.barrier;
  const char* failed = "another of the group's processes has failed";
  const uint32_t round = b.round.load();  // no round is completed before this rank arrives
  if (b.broken.load()) throw GroupError(failed);
  if (a.arrivals) a.arrivals->value.fetch_add(1);
  if (b.arrived.fetch_add(1) + 1 == uint32_t(a.ranks)) {
    b.arrived.store(0);
    b.round.fetch_add(kRound);
    if (b.sleeping.load() > 0) wake(b.round);
    return;
  }
  auto open = [&] {
    const uint32_t now = b.round.load(std::memory_order_acquire);
    if ((now ^ round) >= kRound) return true;
    if (now & kBroken) throw GroupError(failed);
    return false;
  };
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::microseconds(spin_microseconds()))
    for (int i = 0; i < 32; i++) {
      if (open()) return;
      pause();
    }
  while (!open()) {
    const double left = a.timeout - std::chrono::duration<double>(Clock::now() - start).count();
    if (left <= 0) {
      break_group(&b);
      throw GroupError("a process of the group did not come within " +
                       std::to_string(int64_t(a.timeout)) + " s");
    }
    b.sleeping.fetch_add(1);
    sleep_at(b.round, round, left);
    b.sleeping.fetch_sub(1);
  }
}

void counter_post(SharedCounter* counter, uint32_t value) {
  counter->value.store(value);
  if (counter->sleeping.load() > 0) wake(counter->value);
}

bool counter_reached(const SharedCounter& counter, uint32_t value) {
  return int32_t(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

void counter_wait(SharedCounter* counter, uint32_t value, const SharedBarrier& group,
                  double timeout) {
  const auto start = Clock::now();
  auto reached = [&] { return counter_reached(*counter, value); };
  while (Clock::now() - start < std::chrono::microseconds(spin_microseconds()))
    for (int i = 0; i < 32; i++) {
      if (reached()) return;
      pause();
    }
  while (!reached()) {
    if (group.broken.load()) throw GroupError("another of the group's processes has failed");
    if (std::chrono::duration<double>(Clock::now() - start).count() > timeout)
      throw GroupError("a process of the group did not come within " +
                       std::to_string(int64_t(timeout)) + " s");
    counter->sleeping.fetch_add(1);
    const uint32_t seen = counter->value.load();
    // Sleep only briefly: break_group does not wake the waiters of counters.
    if (!reached()) sleep_at(counter->value, seen, 0.1);
    counter->sleeping.fetch_sub(1);
  }
}

}  // namespace octavo
