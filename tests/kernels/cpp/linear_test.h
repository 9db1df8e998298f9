// Products with plain weights, and conversions of numbers.
#pragma once
#include "checks.h"

namespace {

template <class T>
struct Linear {
  int64_t n, k;
  std::vector<T> w, bias;
  Buffer<uint8_t> packed;

  Linear(int64_t n, int64_t k)
      : n(n), k(k), w(random<T>(n * k)), bias(random<T>(n)), packed(padded(n, 64) * padded(k, 32) * sizeof(T)) {
    const int64_t some = std::min<int64_t>(n, 37);  // in two parts
    kernels().pack_weight({w.data(), k, packed.data, 0, some, n, k, Type<T>::dtype, Type<T>::dtype});
    if (some < n)
      kernels().pack_weight(
          {w.data() + some * k, k, packed.data, some, n - some, n, k, Type<T>::dtype, Type<T>::dtype});
  }

  // Rows of x lie k + 3 apart.
  template <class O>
  std::vector<O> run(const T* x, int64_t m, bool with_bias, Gated gated = Gated::none) const {
    const int64_t width = gated == Gated::none ? n : n / 2;
    std::vector<O> out(m * width);
    kernels().linear({x, k + 3, packed.data, with_bias ? bias.data() : nullptr, out.data(), width, m, n, k, 0, 0,
                      gated, 0.0f, Unary::none, Type<T>::dtype, Type<O>::dtype});
    return out;
  }
};

template <class T, class O>
void test_linear(int64_t m, int64_t n, int64_t k) {
  const Linear<T> linear(n, k);
  const std::vector<T> x = strided_rows<T>(m, k);
  for (bool with_bias : {false, true}) {
    const std::vector<O> out = linear.template run<O>(x.data(), m, with_bias);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        float sum = 0;
        double exact = 0, size = 0;
        for (int64_t p = 0; p < k; p++) {
          const double a = get(x[i * (k + 3) + p]), b = get(linear.w[j * k + p]);
          sum = add_product(float(a), float(b), sum);
          exact += a * b, size += std::fabs(a * b);
        }
        if (with_bias) {
          const double b = get(linear.bias[j]);
          sum += float(b), exact += b, size += std::fabs(b);
        }
        const double got = get(out[i * n + j]);
        if (std::is_same_v<T, bf16> && has_dot_bf16())
          check(std::fabs(got - exact) <= 0x1p-20 * size + rounding<O>() * std::fabs(exact) + 1e-7,
                "linear %s %d x %d x %d at %d, %d: %g, not %g", Type<T>::name, int(m), int(n), int(k), int(i),
                int(j), got, exact);
        else  // one order along K for every number of rows
          check(got == rounded<O>(sum), "linear %s %d x %d x %d at %d, %d: %a, not %a", Type<T>::name, int(m),
                int(n), int(k), int(i), int(j), got, double(rounded<O>(sum)));
      }
  }
}

void test_linears() {
  const Product shapes[] = {{0, 8, 8},  {1, 1, 1},    {1, 64, 2},   {2, 63, 3},   {3, 65, 17},
                               {6, 96, 129}, {7, 16, 515}, {13, 40, 1025}, {50, 70, 33}};
  for_types([&](auto t) {
    using T = decltype(t);
    for (auto [m, n, k] : shapes) test_linear<T, T>(m, n, k);
    test_linear<T, float>(5, 100, 300);
    const Linear<T> linear(128, 133);
    const std::vector<T> x = strided_rows<T>(61, 133);
    check_rows_alone<T>("linear", 61, [&](int64_t first, int64_t count) {
      return linear.template run<T>(x.data() + first * 136, count, true);
    });
    for (Gated kind : {Gated::silu, Gated::gelu, Gated::gelu_tanh}) {
      const std::vector<T> apart = gated(linear.template run<T>(x.data(), 9, true), 9, 64, kind);
      check(same(linear.template run<T>(x.data(), 9, true, kind), apart), "gate and up in one go, %s",
            Type<T>::name);
    }
    // An infinity stays in its row, and a row reads no other's.
    std::vector<T> infinite = x;
    infinite[136 * 3 + 5] = make<T>(INFINITY);
    std::vector<T> got = linear.template run<T>(infinite.data(), 5, false),
                   want = linear.template run<T>(x.data(), 5, false);
    for (int64_t j = 0; j < 128; j++) {
      check(std::isinf(get(got[3 * 128 + j])), "infinity, %s", Type<T>::name);
      got[3 * 128 + j] = want[3 * 128 + j];
    }
    check(same(got, want), "infinity in another row, %s", Type<T>::name);
    // Rows of a packed weight, and of a table
    const int64_t ids[] = {3, 127, 0, -1, 128, 64};
    for (bool is_packed : {false, true}) {
      std::vector<T> out(6 * 133);
      kernels().gather({is_packed ? static_cast<const void*>(linear.packed.data) : linear.w.data(), 133, 128,
                        ids, out.data(), 6, 133, is_packed, Type<T>::dtype});
      for (int64_t i = 0; i < 6; i++)
        for (int64_t p = 0; p < 133; p++) {
          const double v = get(out[i * 133 + p]);
          check(ids[i] < 0 || ids[i] > 127 ? v != v : v == get(linear.w[ids[i] * 133 + p]), "gather %s",
                Type<T>::name);
        }
    }
  });
}

// All numbers of 16 bits come back, and float32 rounds to them.
template <class T>
void test_conversions() {
  constexpr Float format = Type<T>::format;
  std::vector<T> every, back(1 << 16);
  for (int i = 0; i < 1 << 16; i++) every.push_back({uint16_t(i)});
  kernels().unary({every.data(), back.data(), 1 << 16, 1, 1 << 16, 1.0f, Unary::scale, Type<T>::dtype});
  for (int i = 0; i < 1 << 16; i++) {
    const double v = get(every[i]), w = get(back[i]);
    check(v != v ? w != w : every[i].bits == back[i].bits, "%s %04x came back as %04x", Type<T>::name, i,
          back[i].bits);
  }
  std::vector<float> wide = {INFINITY, -INFINITY, 0.0f, -0.0f, 65519.9f, 65520.0f, -65520.0f, 3e38f, 3.4e38f};
  for (int e = -12; e < 12; e++)
    for (int i = 0; i < 300; i++) wide.push_back(normal() * float(std::pow(10.0, e)));
  for (int i = 0; i < format.largest; i += 7)
    wide.push_back(float((value_of(i, format) + value_of(i + 1, format)) / 2));
  const int64_t n = int64_t(wide.size());
  Buffer<uint8_t> one(64 * 2 * sizeof(float));
  const float unit = 1;
  kernels().pack_weight({&unit, 1, one.data, 0, 1, 1, 1, DType::f32, DType::f32});
  std::vector<T> narrow(n);
  kernels().linear({wide.data(), 1, one.data, nullptr, narrow.data(), 1, n, 1, 1, 0, 0, Gated::none, 0.0f, Unary::none, DType::f32,
                    Type<T>::dtype});
  for (int64_t i = 0; i < n; i++) {
    const uint32_t want = code_of(wide[i], format);
    // 0 + -0 is 0
    check(narrow[i].bits == want || (narrow[i].bits == 0 && get(T{uint16_t(want)}) == 0),
          "%a became %s %04x, not %04x", wide[i], Type<T>::name, narrow[i].bits, want);
  }
}

}  // namespace
