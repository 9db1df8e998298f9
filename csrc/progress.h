// Progress of a step, for a thread that works concurrently.
#pragma once
#include <atomic>
#include <cstdint>

namespace octavo {

// Number of layers with keys and values in the cache. One thread computes, others may wait.
class StepProgress {
 public:
  void reset() { layers_.store(0, std::memory_order_relaxed); }

  void reach(int32_t layers) {
    layers_.store(layers, std::memory_order_release);
    layers_.notify_all();
  }

  // Waits until this number of layers is done.
  void wait(int32_t layers) const {
    int32_t now;
    while ((now = layers_.load(std::memory_order_acquire)) < layers) layers_.wait(now);
  }

 private:
  std::atomic<int32_t> layers_ = 0;
};

}  // namespace octavo
