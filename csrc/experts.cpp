// Feed-forward blocks of experts, as one set of tasks that threads take as they become free. This file
// calls the kernels of the chosen variant, so it is compiled only once.
//
// A task computes some outputs for some rows of an expert. A task of the second product waits for the
// expert's tasks of the first one. These have lower numbers, so some thread works on them already.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "expert_rows.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kMostRows = 384;   // rows of an expert that are computed together
constexpr int64_t kTasksEach = 16;  // for each thread and product, so that all end together
constexpr int64_t kLeastRows = 16;  // reading a weight takes as long as this number of rows

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of an expert
struct Unit {
  int64_t expert, first, rows;  // first: row of inner and out
};

struct Task {
  int64_t unit, first_panel, num_panels;
};

// One of the two products
struct Product {
  const uint64_t* weights;
  const void* bias;
  int64_t n, k, group, order;
  bool plain;
  QuantFormat format;
};

class Experts {
 public:
  explicit Experts(const ExpertsArgs& a)
      : a_(a),
        item_(size_of(a.dtype)),
        up_{a.up, a.up_bias, a.up_outputs, a.hidden, a.up_group, a.up_order, a.up_plain, a.up_format},
        down_{a.down,       a.down_bias,  a.down_outputs, a.down_inputs,
              a.down_group, a.down_order, a.down_plain,   a.down_format} {
    sort();
    if (a.up) cut(width(), whole_panels());
    up_tasks_ = int64_t(tasks_.size());
    if (a.down) cut(a.down_outputs, true);
    left_ = std::make_unique<std::atomic<int64_t>[]>(units_.size());
    for (int64_t i = 0; i < up_tasks_; i++) left_[tasks_[i].unit].fetch_add(1, std::memory_order_relaxed);
  }

  void run() {
    run_parallel(int64_t(tasks_.size()), 1, true, [](void* self, int64_t begin, int64_t end) {
      const Alone alone;
      for (int64_t i = begin; i < end; i++) static_cast<Experts*>(self)->run(i);
    }, this);
  }

 private:
  // Numbers of a row of inner
  int64_t width() const { return a_.gated == Gated::none ? a_.up_outputs : a_.up_outputs / 2; }

  // True if the product with gate and up applies the activation itself.
  bool whole_panels() const { return a_.gated == Gated::none || width() % kernels().panel == 0; }

  // Calls f with the pairs [begin, end) of each process, and with the process's index.
  template <class F>
  void for_slots(F f) const {
    if (!a_.slot_tokens) return f(0, a_.tokens * a_.top_k, a_.own_slot);
    for (int64_t slot = 0; slot < a_.slots; slot++) {
      const int64_t begin = slot * a_.slot_size;
      f(begin * a_.top_k, (begin + a_.slot_tokens[slot]) * a_.top_k, slot);
    }
  }

  // Sorts pairs of a token and an expert by expert, in order of the tokens.
  void sort() {
    int64_t pairs = 0;
    std::vector<int64_t> next(a_.experts + 1, 0);
    for_slots([&](int64_t begin, int64_t end, int64_t slot) {
      for (int64_t i = begin; i < end; i++) next[a_.ids[i] + 1]++;
      if (a_.counts && slot == a_.own_slot)
        for (int64_t i = begin; i < end; i++) a_.counts[a_.ids[i]]++;
      if (a_.loads)
        for (int64_t i = begin; i < end; i++) a_.loads[a_.ids[i]]++;
      pairs += end - begin;
    });
    const uint64_t* weights = a_.up ? a_.up : a_.down;
    for (int64_t expert = 0, first = 0; expert < a_.experts; expert++) {
      const int64_t rows = next[expert + 1];
      if (weights[expert]) add_units(expert, first, rows);
      next[expert + 1] = first += rows;
    }
    pairs_.resize(pairs);
    for_slots([&](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t row = next[a_.ids[i]]++;
        pairs_[row] = i;
        a_.places[i] = int32_t(row);
      }
    });
  }

  // Adds the units of an expert's rows: all, or this process's part of them. The numbers of rows of the
  // parts differ by one at most; which part has fewer depends on the expert.
  void add_units(int64_t expert, int64_t first, int64_t rows) {
    int64_t begin = 0, end = rows;
    if (a_.shares) {
      const int64_t part = a_.shares[2 * expert], parts = a_.shares[2 * expert + 1];
      const int64_t more = expert % parts;
      begin = (rows * part + more) / parts, end = (rows * (part + 1) + more) / parts;
    }
    for (int64_t i = begin; i < end; i += kMostRows)
      units_.push_back({expert, first + i, std::min(kMostRows, end - i)});
  }

  // Adds the tasks of a product with `n` outputs (gated: of gates).
  void cut(int64_t n, bool divides) {
    const int64_t panels = ceil_div(n, kernels().panel);
    int64_t cost = 0;
    for (const Unit& unit : units_) cost += unit.rows + kLeastRows;
    for (size_t u = 0; u < units_.size(); u++) {
      const int64_t share = (units_[u].rows + kLeastRows) * kTasksEach * num_threads();
      const int64_t parts = divides ? std::min(panels, ceil_div(share, cost)) : 1;
      const int64_t some = ceil_div(panels, parts);
      for (int64_t first = 0; first < panels; first += some)
        tasks_.push_back({int64_t(u), first, std::min(some, panels - first)});
    }
  }

  void run(int64_t index) {
    const Task& task = tasks_[index];
    const Unit& unit = units_[task.unit];
    std::atomic<int64_t>& left = left_[task.unit];
    if (index < up_tasks_) {
      first_product(task, unit);
      left.fetch_sub(1, std::memory_order_release);
      return;
    }
    while (left.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    multiply(down_, task, unit, at<char>(a_.inner, unit.first * a_.inner_stride * item_), a_.inner_stride,
             at<char>(a_.out, unit.first * a_.out_stride * item_), a_.out_stride, Gated::none);
  }

  void first_product(const Task& task, const Unit& unit) {
    const bool whole = whole_panels();
    const int64_t x_nbytes = ceil_div(unit.rows * a_.hidden * item_, 64) * 64;
    const int64_t both_nbytes = whole ? 0 : unit.rows * a_.up_outputs * item_;
    char* memory = static_cast<char*>(scratch(x_nbytes + both_nbytes, 3));
    char* inner = at<char>(a_.inner, unit.first * a_.inner_stride * item_);
    const char* x = memory;
    int64_t stride = a_.hidden;
    if (unit.rows == 1 && !a_.factors)
      x = at<char>(a_.x, pairs_[unit.first] / a_.top_k * a_.x_stride * item_), stride = a_.x_stride;
    else
      gather(unit, memory);
    if (!whole) {
      char* both = memory + x_nbytes;
      multiply(up_, task, unit, x, stride, both, a_.up_outputs, Gated::none, true);
      kernels().gated({both, a_.up_outputs, inner, a_.inner_stride, unit.rows, width(), a_.gated,
                       a_.limit, a_.dtype});
      return;
    }
    multiply(up_, task, unit, x, stride, inner, a_.inner_stride, a_.gated);
    if (a_.gated != Gated::none || a_.activation == Unary::none) return;
    const int64_t first = task.first_panel * kernels().panel;
    const int64_t count = std::min(task.num_panels * kernels().panel, a_.up_outputs - first);
    for (int64_t i = 0; i < unit.rows; i++) {
      char* row = inner + (i * a_.inner_stride + first) * item_;
      kernels().unary({row, row, count, 1, count, 0, a_.activation, a_.dtype});
    }
  }

  // Copies the rows of x of a unit.
  void gather(const Unit& unit, char* to) const {
    for (int64_t i = 0; i < unit.rows; i++, to += a_.hidden * item_)
      copy_input(a_, pairs_[unit.first + i], a_.hidden, to);
  }

  void multiply(const Product& p, const Task& task, const Unit& unit, const char* x, int64_t x_stride,
                char* out, int64_t out_stride, Gated gated, bool all = false) const {
    const char* weight = reinterpret_cast<const char*>(p.weights[unit.expert]);
    const void* bias = p.bias ? at<char>(p.bias, unit.expert * p.n * item_) : nullptr;
    const int64_t first = all ? 0 : task.first_panel, count = all ? 0 : task.num_panels;
    if (p.plain)
      return kernels().linear({x, x_stride, weight, bias, out, out_stride, unit.rows, p.n, p.k, first,
                               count, gated, a_.limit, Unary::none, a_.dtype, a_.dtype});
    const int32_t* order = p.order ? at<const int32_t>(weight, p.order) : nullptr;
    kernels().linear_q({x, x_stride, weight, order, bias, out, out_stride, unit.rows, p.n, p.k, p.group,
                        first, count, p.format, gated, a_.limit, Unary::none, a_.dtype, a_.dtype});
  }

  const ExpertsArgs& a_;
  const int64_t item_;
  const Product up_, down_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<int64_t> pairs_;  // [tokens * top_k]: the pair of each row
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // unfinished tasks of the first product, by unit
  int64_t up_tasks_ = 0;
};

}  // namespace

void experts(const ExpertsArgs& a) {
  if (a.tokens > 0 || a.slot_tokens) Experts(a).run();
}

void send_tokens(const SendTokensArgs& a) {
  const int64_t row = a.hidden * size_of(a.dtype);
  for (int64_t i = 0; i < a.tokens; i++)
    memcpy(at<char>(a.x_out, i * row), at<char>(a.x, i * a.x_stride * size_of(a.dtype)), row);
  memcpy(a.ids_out, a.ids, a.tokens * a.top_k * sizeof(int32_t));
  if (a.factors) memcpy(a.factors_out, a.factors, a.tokens * a.top_k * sizeof(float));
  *a.tokens_out = int32_t(a.tokens);
}

}  // namespace octavo
