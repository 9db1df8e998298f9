// Products with quantized weights, and quantization.
#pragma once
#include "checks.h"

namespace {

constexpr int kLevels[16] = {-127, -101, -76, -58, -44, -31, -20, -10, 0, 10, 20, 31, 43, 58, 74, 95};
constexpr int kNf4Levels[16] = {-32767, -22812, -17205, -12940, -9320, -6054, -2983, 0,
                                2608,   5273,   8064,   11072,  14441, 18435, 23689, 32767};

struct QuantLinear {
  QuantFormat format;
  int64_t n, k, group, groups;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;
  Buffer<uint8_t> packed;

  QuantLinear(QuantFormat format, int64_t n, int64_t k, int64_t group)
      : format(format), n(n), k(k), group(group), groups(group ? (k + group - 1) / group : 1), codes(n * k),
        zeros(n * groups), scales(n * groups), packed(nbytes()) {
    for (uint8_t& code : codes) {
      code = uint8_t(below(of_bytes() ? 256 : 16));
      if (format == QuantFormat::fp8) code = uint8_t(below(127) | below(2) << 7);  // not NaN
    }
    for (uint8_t& zero : zeros) zero = uint8_t(below(of_bytes() ? 256 : 16));
    for (float& scale : scales) scale = rounded<f16>(normal()) / (format == QuantFormat::nf4 ? 256 : 1);
    kernels().pack_quant({codes.data(), scales.data(),
                          has_zeros() ? zeros.data() : nullptr, packed.data, 0, n, n, k, group, format});
  }

  bool of_bytes() const { return format == QuantFormat::int8 || format == QuantFormat::int8_groups; }
  bool has_zeros() const { return format == QuantFormat::int4_zeros || format == QuantFormat::int8_groups; }

  int64_t nbytes() const {
    if (format == QuantFormat::int8) return padded(n, 64) * (padded(k, 64) + 4);
    if (format == QuantFormat::fp8) return padded(n, 64) * (padded(k, 32) + 4 * groups);
    if (format == QuantFormat::int8_groups) return padded(n, 64) * groups * (group + 5);
    return padded(n, 64) * groups * (group / 2 + (format == QuantFormat::nf4 ? 4 : 3));
  }

  // A row of x of [rows][k + 3] times the weight, as quant.h says: integers, then roundings in order.
  template <class T>
  std::vector<float> expected(const T* x) const {
    const int64_t step = group ? group : k;
    std::vector<int> q(k);
    std::vector<float> x_scales(groups), out(n);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t from = g * step, to = std::min(k, from + step);
      float most = 0;
      for (int64_t p = from; p < to; p++) most = std::max(most, float(std::fabs(get(x[p]))));
      const float inverse = most < 1e-35f ? 0.0f : 127.0f / most;
      for (int64_t p = from; p < to; p++) q[p] = int(std::nearbyint(float(get(x[p])) * inverse));
      x_scales[g] = most < 1e-35f ? 0.0f : most / 127.0f;
      if (format == QuantFormat::int4_levels) x_scales[g] *= 0.0625f;
    }
    for (int64_t j = 0; j < n; j++)
      for (int64_t g = 0; g < groups; g++) {
        int sum = 0;
        for (int64_t p = g * step; p < std::min(k, (g + 1) * step); p++) {
          const int code = codes[j * k + p];
          switch (format) {
            case QuantFormat::int8: sum += (code - 128) * q[p]; break;
            case QuantFormat::int4_levels: sum += kLevels[code] * q[p]; break;
            case QuantFormat::int4: sum += (code - 8) * q[p]; break;
            case QuantFormat::nf4: sum += kNf4Levels[code] * q[p]; break;
            case QuantFormat::int8_groups:
            case QuantFormat::int4_zeros: sum += (code - zeros[j * groups + g]) * q[p]; break;
          }
        }
        const float scale = scales[j * groups + g], part = float(sum) * x_scales[g];
        out[j] = format == QuantFormat::int8 ? part * scale : add_product(part, scale, out[j]);
      }
    return out;
  }

  template <class T>
  std::vector<T> run(const T* x, int64_t m, const T* bias, Gated gated = Gated::none) const {
    const int64_t width = gated == Gated::none ? n : n / 2;
    std::vector<T> out(m * width);
    kernels().linear_q({x, k + 3, packed.data, nullptr, bias, out.data(), width, m, n, k, group, 0, 0, format, gated, 0.0f, Unary::none,
                        Type<T>::dtype, Type<T>::dtype});
    return out;
  }
};

constexpr struct {
  QuantFormat format;
  int64_t group;
  const char* name;
} kForms[] = {{QuantFormat::int8, 0, "int8"},           {QuantFormat::int4_levels, 32, "int4_levels-32"},
              {QuantFormat::int4_levels, 64, "int4_levels-64"}, {QuantFormat::int4, 32, "int4-32"},
              {QuantFormat::int4, 128, "int4-128"},     {QuantFormat::int4_zeros, 64, "int4_zeros-64"},
              {QuantFormat::nf4, 64, "nf4-64"},         {QuantFormat::int8_groups, 128, "int8_groups-128"}};

void test_quantized() {
  const Product shapes[] = {{1, 1, 1}, {2, 63, 3}, {3, 65, 172}, {7, 16, 1023}, {14, 70, 515}, {2, 20, 4133}};
  for (const auto& form : kForms)
    for_types([&](auto t) {
      using T = decltype(t);
      for (auto [m, n, k] : shapes) {
        const QuantLinear linear(form.format, n, k, form.group);
        std::vector<T> x = strided_rows<T>(m, k), bias = random<T>(n);
        if (m > 1) std::fill(x.begin(), x.begin() + k, T{});  // a row of zeros
        for (bool with_bias : {false, true}) {
          const std::vector<T> out = linear.run(x.data(), m, with_bias ? bias.data() : nullptr);
          for (int64_t i = 0; i < m; i++) {
            const std::vector<float> want = linear.expected(x.data() + i * (k + 3));
            for (int64_t j = 0; j < n; j++) {
              const float v = rounded<T>(want[j] + (with_bias ? float(get(bias[j])) : 0.0f));
              check(get(out[i * n + j]) == v, "linear_q %s %s %d x %d x %d at %d, %d: %a, not %a", form.name,
                    Type<T>::name, int(m), int(n), int(k), int(i), int(j), get(out[i * n + j]), double(v));
            }
          }
        }
      }
      const QuantLinear linear(form.format, 128, 200, form.group);
      const std::vector<T> x = strided_rows<T>(61, 200);
      check_rows_alone<T>(form.name, 61, [&](int64_t first, int64_t count) {
        return linear.run(x.data() + first * 203, count, static_cast<const T*>(nullptr));
      });
      const std::vector<T> apart = gated(linear.run(x.data(), 9, static_cast<const T*>(nullptr)), 9, 64,
          Gated::silu);
      check(same(linear.run(x.data(), 9, static_cast<const T*>(nullptr), Gated::silu), apart),
            "gate and up in one go, %s", form.name);
    });
}

void test_fp8() {
  const Product shapes[] = {{1, 1, 1}, {2, 63, 3}, {3, 65, 172}, {7, 16, 1023}, {14, 70, 515}};
  for (int64_t group : {0, 32, 128})
    for_types([&](auto t) {
      using T = decltype(t);
      for (auto [m, n, k] : shapes) {
        const QuantLinear linear(QuantFormat::fp8, n, k, group);
        const std::vector<T> x = strided_rows<T>(m, k), bias = random<T>(n);
        const std::vector<T> out = linear.run(x.data(), m, bias.data());
        for (int64_t i = 0; i < m; i++)
          for (int64_t j = 0; j < n; j++) {
            double sum = get(bias[j]), size = 0;
            for (int64_t p = 0; p < k; p++) {
              const double scale = linear.scales[j * linear.groups + (group ? p / group : 0)];
              const double v = get(x[i * (k + 3) + p]) * value_of(linear.codes[j * k + p], kE4m3) * scale;
              sum += v, size += std::fabs(v);
            }
            check(near(out[i * n + j], sum, 2e-6 * size), "fp8-%d %s %d x %d x %d at %d, %d: %a, not %a",
                  int(group), Type<T>::name, int(m), int(n), int(k), int(i), int(j), get(out[i * n + j]), sum);
          }
      }
      const QuantLinear linear(QuantFormat::fp8, 128, 200, group);
      const std::vector<T> x = strided_rows<T>(61, 200);
      check_rows_alone<T>("fp8", 61, [&](int64_t first, int64_t count) {
        return linear.run(x.data() + first * 203, count, static_cast<const T*>(nullptr));
      });
    });
}

// Weights quantized at load: what a product with the unit matrix gives back.
void test_quantize_weight() {
  constexpr int64_t n = 70, k = 96;
  for_types([&](auto t) {
    using T = decltype(t);
    const std::vector<T> w = random<T>(n * k);
    std::vector<T> unit(k * (k + 3));
    for (int64_t i = 0; i < k; i++) unit[i * (k + 3) + i] = make<T>(1);
    for (const auto& [format, group, name, most] :
         {std::tuple{QuantFormat::int8, 0, "int8", 0.02},
          {QuantFormat::int4_levels, 32, "int4_levels", 0.11}}) {
      QuantLinear linear(format, n, k, group);
      kernels().quantize_weight({w.data(), k, linear.packed.data, 0, n, n, k, group, format, Type<T>::dtype});
      const std::vector<T> back = linear.run(unit.data(), k, static_cast<const T*>(nullptr));
      double error = 0, size = 0;
      for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < n; j++) {
          const double v = get(w[j * k + i]), d = get(back[i * n + j]) - v;
          error += d * d, size += v * v;
        }
      check(std::sqrt(error / size) < most, "quantize_weight %s loses %g", name, std::sqrt(error / size));
    }
  });
}

}  // namespace
