// A step as a list of kernel calls, recorded once and run for steps of any size.
//
// While a plan records, calls are added to it instead of being run. They keep their addresses, so
// their tensors must not move, and must be large enough for the largest step.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "progress.h"

namespace octavo {

// Names of the sizes of a step: the dimensions of layers/step_table.py that calls bind to.
enum class Dim : int { tokens, requests, samples };
constexpr std::array<const char*, 3> kDims = {"tokens", "requests", "samples"};
using StepSizes = std::array<int64_t, kDims.size()>;

// Every `size`-th row, from row `index` on.
struct RowShare {
  int64_t index = 0, size = 1;
  int64_t of(int64_t rows) const { return rows > index ? (rows - index - 1) / size + 1 : 0; }
};

struct Span {
  std::string name;
  double start, end;  // seconds of the steady clock
  Work work;
  int64_t rows;
};

// Spans of the kernels of this process, recorded while profiling is on.
struct Profile {
  std::atomic<bool> on = false;
  std::mutex mutex;  // of spans: several engines may compute, and another thread reads them
  std::vector<Span> spans;
};
inline Profile profile;

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Args>
int64_t rows_of(const Args& args) {
  if constexpr (requires { args.m; })
    return args.m;
  else if constexpr (requires { args.rows; })
    return args.rows;
  else if constexpr (requires { args.tokens; })
    return args.tokens;
  else
    return args.query_start_loc[args.num_reqs];
}

template <class Args>
void run_kernel(const std::string& name, void (*kernel)(const Args&), const Args& args) {
  if (!profile.on.load(std::memory_order_relaxed)) return kernel(args);
  const double start = seconds();
  kernel(args);
  const double end = seconds();
  std::lock_guard lock(profile.mutex);
  profile.spans.push_back({name, start, end, args.work(), rows_of(args)});
}

class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;

  // Binds the number of rows of the calls added from now on to a dimension.
  void bind(Dim rows) { rows_ = rows; }

  // Restricts the rows of the calls added from now on to a share; the calls have that of the
  // largest step.
  void share(RowShare part) { part_ = part; }

  template <class Args>
  void add(std::string name, void (*kernel)(const Args&), const Args& args) {
    calls_.push_back(std::make_unique<Call<Args>>(std::move(name), kernel, args, rows_, part_));
  }

  // Adds a report to `progress` that this number of layers is done.
  void mark(StepProgress& progress, int32_t layers) {
    calls_.push_back(std::make_unique<Mark>(progress, layers));
  }

  // A run calls `function` with the sizes of the step.
  void call(std::function<void(const StepSizes&)> function) {
    calls_.push_back(std::make_unique<Function>(std::move(function)));
  }

  void run(const StepSizes& sizes) {
    for (auto& call : calls_) call->run(sizes);
  }

  size_t size() const { return calls_.size(); }

 private:
  struct AnyCall {
    virtual ~AnyCall() = default;
    virtual void run(const StepSizes& sizes) = 0;
  };

  struct Mark : AnyCall {
    StepProgress& progress;
    int32_t layers;
    Mark(StepProgress& progress, int32_t layers) : progress(progress), layers(layers) {}
    void run(const StepSizes&) override { progress.reach(layers); }
  };

  struct Function : AnyCall {
    std::function<void(const StepSizes&)> function;
    explicit Function(std::function<void(const StepSizes&)> function) : function(std::move(function)) {}
    void run(const StepSizes& sizes) override { function(sizes); }
  };

  template <class Args>
  struct Call : AnyCall {
    std::string name;
    void (*kernel)(const Args&);
    Args args;
    Dim rows;
    RowShare part;

    Call(std::string name, void (*kernel)(const Args&), const Args& args, Dim rows, RowShare part)
        : name(std::move(name)), kernel(kernel), args(args), rows(rows), part(part) {}

    void run(const StepSizes& sizes) override {
      const StepSize size{part.of(sizes[int(rows)]), sizes[int(Dim::requests)]};
      if (size.rows == 0) return;
      args.resize(size);
      run_kernel(name, kernel, args);
    }
  };

  Dim rows_ = Dim::tokens;
  RowShare part_;
  std::vector<std::unique_ptr<AnyCall>> calls_;
};

}  // namespace octavo
