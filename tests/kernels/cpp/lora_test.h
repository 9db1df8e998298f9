// Adapters: changes of a layer's results, and layers of their own.
#pragma once
#include "checks.h"

namespace {

// A matrix [rows, k] of an adapter, packed in panels of rows
template <class T>
struct Packed {
  int64_t rows, k;
  std::vector<float> numbers;
  Buffer<T> data;

  Packed(int64_t rows, int64_t k, int64_t panel)
      : rows(rows), k(k), numbers(random<float>(rows * k)), data(padded(rows, panel) * k) {
    kernels().pack_lora({numbers.data(), k, data.data, rows, k, panel, DType::f32, Type<T>::dtype});
  }
  double at(int64_t row, int64_t i) const { return rounded<T>(numbers[row * k + i]); }
};

// An adapter's change of some outputs
template <class T>
struct Change {
  static constexpr float scale = 0.25f;
  Packed<T> a, b;

  Change(int64_t rank, int64_t n, int64_t k) : a(rank, k, kLoraLanes), b(n, rank, kLoraPanel) {}
  LoraSlice slice() const { return {a.data.data, b.data.data, nullptr, a.rows, scale}; }
  // Of an output, for x(i); adds the sizes of the terms.
  template <class X>
  double of(int64_t output, X x, double& size) const {
    double sum = 0;
    for (int64_t r = 0; r < a.rows; r++) {
      double u = 0, most = 0;
      for (int64_t i = 0; i < a.k; i++) u += x(i) * a.at(r, i), most += std::fabs(x(i) * a.at(r, i));
      sum += scale * u * b.at(output, r), size += scale * most * std::fabs(b.at(output, r));
    }
    return sum;
  }
};

// Rows of a result, in memory with guards around them, of which a call changes some.
template <class T>
struct Guarded {
  int64_t m, n;
  std::vector<T> before, after;

  Guarded(int64_t m, int64_t n) : m(m), n(n), before(random<T>((m + 2) * (n + 5))), after(before) {}
  T* rows() { return after.data() + n + 5; }
  double was(int64_t i, int64_t j) const { return get(before[(i + 1) * (n + 5) + j]); }
  T is(int64_t i, int64_t j) const { return after[(i + 1) * (n + 5) + j]; }
  void check_guards(const char* name) const {
    std::vector<T> kept = before;
    for (int64_t i = 0; i < m; i++)
      std::copy_n(after.begin() + (i + 1) * (n + 5), n, kept.begin() + (i + 1) * (n + 5));
    check(same(kept, after), "%s %s writes beside its rows", name, Type<T>::name);
  }
};

template <class T>
void check_changed(const char* name, T got, double truth, double size) {
  const double bound = 1e-5 * (1 + size) + 2 * rounding<T>() * std::fabs(truth);
  check(std::fabs(get(got) - truth) <= bound, "%s %s: %g, not %g", name, Type<T>::name, double(get(got)), truth);
}

std::vector<int32_t> some_slots(int64_t rows, int64_t slots) {
  std::vector<int32_t> all(rows);
  for (int64_t i = 0; i < rows; i++) all[i] = int32_t(i * 7 / 3 % (slots + 1)) - 1;
  return all;
}

template <class T>
void test_add_lora(int64_t m, int64_t k) {
  const int64_t bounds[] = {0, 70, 86}, n = 86;
  const Change<T> changes[2][2] = {{{3, 70, k}, {16, 16, k}}, {{33, 70, k}, {1, 16, k}}};
  std::vector<LoraSlice> slices;
  for (const auto& adapter : changes)
    for (const Change<T>& change : adapter) slices.push_back(change.slice());
  slices[2].a = nullptr;  // the second adapter leaves the first module as it is
  slices[2].rank = 0;
  const std::vector<T> x = strided_rows<T>(m, k);
  const std::vector<int32_t> slots = some_slots(m, 2);
  Guarded<T> out(m, n);
  kernels().add_lora({x.data(), k + 3, out.rows(), n + 5, slots.data(), slices.data(), bounds, m, k, 2, 33,
                      Type<T>::dtype, Type<T>::dtype});
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      const int64_t slot = slots[i], module = j >= 70;
      double truth = out.was(i, j), size = std::fabs(truth);
      if (slot >= 0 && slices[slot * 2 + module].a)
        truth += changes[slot][module].of(
            j - bounds[module], [&](int64_t p) { return get(x[i * (k + 3) + p]); }, size);
      check_changed("add_lora", out.is(i, j), truth, size);
    }
  out.check_guards("add_lora");
  if (m < 25) return;
  const std::vector<T> base = random<T>(m * n);
  check_rows_alone<T>("add_lora", m, [&](int64_t first, int64_t count) {
    std::vector<T> rows(base.begin() + first * n, base.begin() + (first + count) * n);
    kernels().add_lora({x.data() + first * (k + 3), k + 3, rows.data(), n, slots.data() + first, slices.data(),
                        bounds, count, k, 2, 33, Type<T>::dtype, Type<T>::dtype});
    return rows;
  });
}

template <class T>
void test_lora_embedding() {
  const int64_t m = 40, n = 70, vocab = 11;
  const Change<T> changes[] = {{5, n, vocab}, {80, n, vocab}};
  const LoraSlice slices[] = {changes[0].slice(), changes[1].slice()};
  const std::vector<int32_t> slots = some_slots(m, 2);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < m; i++) ids.push_back(i * 5 % 13 - 1);  // two of them are none
  Guarded<T> out(m, n);
  kernels().add_lora_embedding(
      {ids.data(), out.rows(), n + 5, slots.data(), slices, m, vocab, n, 80, Type<T>::dtype});
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double truth = out.was(i, j), size = std::fabs(truth);
      if (slots[i] >= 0 && ids[i] >= 0 && ids[i] < vocab)
        truth += changes[slots[i]].of(j, [&](int64_t p) { return double(p == ids[i]); }, size);
      check_changed("add_lora_embedding", out.is(i, j), truth, size);
    }
  out.check_guards("add_lora_embedding");
}

template <class T>
void test_replaced(int64_t m) {
  const int64_t n = 70, k = 133;
  const Packed<T> weight(n, k, kLoraPanel);
  const std::vector<T> bias = random<T>(n), x = strided_rows<T>(m, k), table = random<T>(11 * n);
  const std::vector<int32_t> slots = some_slots(m, 3);
  for (bool with_bias : {false, true}) {
    const WholeLayer layers[] = {{weight.data.data, with_bias ? bias.data() : nullptr}, {}, {}};
    Guarded<T> out(m, n);
    kernels().replace_linear({x.data(), k + 3, out.rows(), n + 5, slots.data(), layers, m, k, n, Type<T>::dtype,
                              Type<T>::dtype});
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        double truth = with_bias ? get(bias[j]) : 0, size = 0;
        for (int64_t p = 0; p < k; p++) {
          const double term = get(x[i * (k + 3) + p]) * weight.at(j, p);
          truth += term, size += std::fabs(term);
        }
        check_changed("replace_linear", out.is(i, j), slots[i] == 0 ? truth : out.was(i, j), size);
      }
    out.check_guards("replace_linear");
  }
  const WholeLayer tables[] = {{}, {table.data(), nullptr}, {}};
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < m; i++) ids.push_back(i % 13 - 1);
  Guarded<T> out(m, n);
  kernels().replace_embedding(
      {ids.data(), out.rows(), n + 5, slots.data(), tables, m, 11, n, Type<T>::dtype});
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      const bool changed = slots[i] == 1 && ids[i] >= 0 && ids[i] < 11;
      const double truth = changed ? get(table[ids[i] * n + j]) : out.was(i, j);
      check(get(out.is(i, j)) == truth, "replace_embedding %s", Type<T>::name);
    }
  out.check_guards("replace_embedding");
}

template <class T>
void test_expert_lora(int64_t tokens) {
  const int64_t k = 70, n = 64, experts = 3, top_k = 2, pairs = tokens * top_k, bounds[] = {0, 32, 64};
  std::deque<Change<T>> changes;
  std::vector<LoraSlice> slices;
  for (int64_t i = 0; i < 2 * experts * 2; i++) {
    changes.emplace_back(2 + i, 32, k);
    slices.push_back(changes.back().slice());
  }
  const std::vector<T> x = strided_rows<T>(tokens, k);
  const std::vector<int32_t> slots = some_slots(tokens, 2);
  std::vector<int32_t> ids, places(pairs), pair_slots(pairs);
  for (int64_t i = 0; i < tokens; i++) ids.push_back(i % 3), ids.push_back((i + 1 + i % 2) % 3);
  int32_t row = 0;
  for (int64_t expert = 0; expert < experts; expert++)
    for (int64_t i = 0; i < pairs; i++)
      if (ids[i] == expert) places[i] = row++;
  std::vector<T> out = random<T>(pairs * n), gathered(pairs * k);
  const std::vector<T> base = out;
  Guarded<T> inner(pairs, 32);
  kernels().add_expert_lora({x.data(), k + 3, nullptr, ids.data(), places.data(), slots.data(), slices.data(),
                             bounds, pair_slots.data(), gathered.data(), out.data(), inner.rows(), n, 37, tokens,
                             top_k, experts, k, 2, 13, Gated::silu, Unary::none, 0.0f, Type<T>::dtype});
  for (int64_t i = 0; i < pairs; i++)
    for (int64_t j = 0; j < n; j++) {
      const int64_t slot = slots[i / top_k], at = places[i] * n + j;
      double truth = get(base[at]), size = std::fabs(truth);
      if (slot >= 0)
        truth += changes[(slot * experts + ids[i]) * 2 + j / 32].of(
            j % 32, [&](int64_t p) { return get(x[i / top_k * (k + 3) + p]); }, size);
      check_changed("add_expert_lora", out[at], truth, size);
    }
  const std::vector<T> activated = gated(out, pairs, 32, Gated::silu);
  for (int64_t i = 0; i < pairs; i++)
    for (int64_t j = 0; j < 32; j++)
      check(get(inner.is(i, j)) == get(activated[i * 32 + j]), "activation of add_expert_lora %s", Type<T>::name);
  inner.check_guards("add_expert_lora");

  // Rows of this process among those of others, two apart; the last expert's are left out.
  const std::vector<int32_t> share = {1, 1, 0};
  std::vector<int32_t> among = places, own_places(pairs);
  for (int32_t& place : among) place = 2 * place + 1;
  Guarded<T> all(2 * pairs, n);
  std::vector<T> own(pairs * n);
  ExpertRowsArgs args{all.rows(), own.data(), n + 5, n, ids.data(), among.data(), own_places.data(), share.data(),
                      tokens, top_k, experts, n, Type<T>::dtype};
  kernels().take_expert_rows(args);
  check(own_places == places, "take_expert_rows sorts the rows by expert");
  for (T& v : own) v = make<T>(2 * get(v));
  kernels().put_expert_rows(args);
  for (int64_t i = 0; i < pairs; i++)
    for (int64_t j = 0; j < n; j++) {
      const double was = all.was(among[i], j);
      check(get(all.is(among[i], j)) == (ids[i] == 2 ? was : 2 * was), "put_expert_rows %s", Type<T>::name);
      check(get(all.is(among[i] - 1, j)) == all.was(among[i] - 1, j), "put_expert_rows, rows of others");
    }
  all.check_guards("put_expert_rows");
}

template <class T>
void test_lora_norms() {
  const int64_t rows = 7, k = 133, rank = 5;
  const std::vector<T> w = strided_rows<T>(rows, k);
  const std::vector<float> a = random<float>(rank * k), b = random<float>(rows * rank);
  std::vector<float> out(rows), alone(rows);
  kernels().lora_norms({w.data(), k + 3, a.data(), b.data(), out.data(), rows, k, rank, Type<T>::dtype});
  for (int64_t i = 0; i < rows; i++) {
    double squares = 0;
    for (int64_t p = 0; p < k; p++) {
      double sum = get(w[i * (k + 3) + p]);
      for (int64_t r = 0; r < rank; r++) sum += double(b[i * rank + r]) * a[r * k + p];
      squares += sum * sum;
    }
    check(std::fabs(out[i] - std::sqrt(squares)) <= 1e-5 * std::sqrt(squares), "lora_norms %s", Type<T>::name);
    kernels().lora_norms({w.data() + i * (k + 3), k + 3, a.data(), b.data() + i * rank, alone.data() + i, 1, k, rank,
                          Type<T>::dtype});
  }
  check(same(out, alone), "lora_norms %s: rows alone differ", Type<T>::name);
}

void test_lora() {
  for_types([&](auto t) {
    using T = decltype(t);
    for (int64_t m : {1, 7, 40}) {
      test_add_lora<T>(m, m == 7 ? 700 : 70);
      test_replaced<T>(m);
      test_expert_lora<T>(m);
    }
    test_lora_embedding<T>();
    test_lora_norms<T>();
  });
}

}  // namespace
