#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than the pauses between the kernels of a step, far shorter than a time slice: a waiting
// thread neither needs a wake-up for each kernel nor occupies its core for long.
std::atomic<int64_t> spin_time{50};  // in microseconds

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until `ready`, at most the spin time.
template <class F>
bool spin(F ready) {
  const auto end = Clock::now() + std::chrono::microseconds(spin_microseconds());
  while (Clock::now() < end)
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      pause();
    }
  return false;
}

int all_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

class Pool {
 public:
  explicit Pool(int wanted) : wanted_(wanted) {}

  void run(int64_t n, int64_t chunk, bool wake, Body body, void* context) {
    std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock) return body(context, 0, n);
    if (!started_) start();
    job_ = {body, context, n, chunk, (n + chunk - 1) / chunk};
    unfinished_.store(job_.chunks, std::memory_order_relaxed);
    tickets_.store(++number_ << 32 | uint64_t(job_.chunks));
    if (wake && sleeping_.load() > 0) ring();
    while (work()) {
    }
    auto done = [&] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (!spin(done))  // a thread was interrupted in the middle of a piece: yield the core to it
      while (!done()) std::this_thread::yield();
  }

  int size() {
    std::lock_guard lock(busy_);
    if (!started_) start();
    return int(threads_.size()) + 1;
  }

  void resize(int n) {
    std::lock_guard lock(busy_);
    wanted_.store(n);
    start();
  }

  int wanted() const { return wanted_.load(); }

 private:
  struct Job {
    Body body;
    void* context;
    int64_t n, chunk, chunks;
  };

  // Claims a piece of the current job and runs it; returns false if none is left. The claimed
  // ticket holds the number of its job, so no thread can claim a piece of one job and run another's
  // body.
  bool work() {
    uint64_t tickets = tickets_.load(std::memory_order_acquire);
    while (uint32_t(tickets) != 0) {
      if (!tickets_.compare_exchange_weak(tickets, tickets - 1, std::memory_order_acq_rel)) continue;
      const int64_t begin = (job_.chunks - int64_t(uint32_t(tickets))) * job_.chunk;
      job_.body(job_.context, begin, std::min(job_.n, begin + job_.chunk));
      unfinished_.fetch_sub(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void serve(const std::atomic<bool>& stop) {
    while (!stop.load()) {
      if (work()) continue;
      auto called = [&] { return uint32_t(tickets_.load(std::memory_order_relaxed)) != 0; };
      if (spin(called)) continue;
      sleeping_.fetch_add(1);
      const uint32_t bell = bell_.load();
      if (!called_now() && !stop.load()) bell_.wait(bell);
      sleeping_.fetch_sub(1);
    }
  }

  bool called_now() const { return uint32_t(tickets_.load()) != 0; }

  void ring() {
    bell_.fetch_add(1);
    bell_.notify_all();
  }

  void start() {
    const int n = wanted_.load() > 0 ? wanted_.load() : all_cores();
    started_ = true;
    stop_.store(true);
    ring();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    stop_.store(false);
    for (int i = 1; i < n; i++) threads_.emplace_back([this] { serve(stop_); });
  }

  alignas(64) std::atomic<uint64_t> tickets_{0};  // number of the job << 32 | pieces not yet claimed
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> wanted_;  // configured number of threads; 0: all cores
  Job job_{};
  uint64_t number_ = 0;
  bool started_ = false;
  std::mutex busy_;
  std::vector<std::thread> threads_;
};

std::atomic<int> cached_size{0};
thread_local bool alone = false;

// Never destroyed: its threads end with the process.
Pool*& instance() {
  static Pool* pool = [] {
    // A forked process has none of the threads, and perhaps a lock that is never released.
    pthread_atfork(nullptr, nullptr, [] {
      instance() = new Pool(instance()->wanted());
      cached_size.store(0);
    });
    return new Pool(0);
  }();
  return pool;
}

Pool& pool() { return *instance(); }

}  // namespace

void run_parallel(int64_t n, int64_t chunk, bool wake, Body body, void* context) {
  pool().run(n, chunk, wake, body, context);
}

Alone::Alone() : before_(alone) { alone = true; }
Alone::~Alone() { alone = before_; }
void work_alone() { alone = true; }

int num_threads() {
  if (alone) return 1;
  int n = cached_size.load(std::memory_order_relaxed);
  if (n == 0) cached_size.store(n = pool().size());
  return n;
}

int64_t spin_microseconds() { return spin_time.load(std::memory_order_relaxed); }

void set_spin_microseconds(int64_t time) { spin_time.store(time); }

void set_num_threads(int n) {
  pool().resize(n);
  cached_size.store(pool().size());
}

}  // namespace octavo
