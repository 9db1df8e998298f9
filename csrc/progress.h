// How far a step has come, for a thread that works beside it.
#pragma once
#include <atomic>
#include <cstdint>

namespace octavo {

// Counts the layers whose keys and values are in the cache. One thread computes, others may wait.
class StepProgress {
 public:
  void reset() { layers_.store(0, std::memory_order_relaxed); }

  void reach(int32_t layers) {
    layers_.store(layers, std::memory_order_release);
    layers_.notify_all();
  }

  // Returns once there are so many.
  void wait(int32_t layers) const {
    int32_t now;
    while ((now = layers_.load(std::memory_order_acquire)) < layers) layers_.wait(now);
  }

 private:
  std::atomic<int32_t> layers_ = 0;
};

}  // namespace octavo
