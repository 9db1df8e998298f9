// Every kernel of every variant that this processor has, against plain C++, and bit for bit against
// itself in other company. A test without Python, for processors that are only emulated:
//   cmake -S . -B build/kernels_test -DOCTAVO_KERNELS_TEST=ON -DCMAKE_BUILD_TYPE=Release
//   cmake --build build/kernels_test && build/kernels_test/kernels_test
// Prints the variants, best first, on one line, then what is wrong; ends with 1 if anything is. With the
// name of a variant it tests that one only.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "dispatch.h"
#include "philox.h"
#include "pool.h"

using namespace octavo;

namespace {

int failures = 0;

template <class... Args>
void check(bool right, const char* format, Args... args) {
  if (right || ++failures > 20) return;
  std::printf("%s: ", kernels().isa);
  std::printf(format, args...);
  std::printf("\n");
}

bool is_isa(const char* name) { return !std::strcmp(kernels().isa, name); }
// Products of bfloat16 numbers by an instruction that rounds in its own way
bool has_dot_bf16() { return is_isa("avx512_bf16") || is_isa("amx") || is_isa("amx_emulated") || is_isa("neon_bf16"); }

// ---- numbers: mantissa bits, exponent bias, the largest finite code ----

struct Float {
  int bits, mantissa, bias, largest;
};
constexpr Float kF32 = {32, 23, 127, 0x7f7fffff}, kBf16 = {16, 7, 127, 0x7f7f}, kF16 = {16, 10, 15, 0x7bff},
                kE4m3 = {8, 3, 7, 0x7e}, kE5m2 = {8, 2, 15, 0x7b};

double value_of(uint32_t code, Float f) {
  const uint32_t sign = code >> (f.bits - 1), body = code & ((1u << (f.bits - 1)) - 1);
  const int exponent = int(body >> f.mantissa);
  const double fraction = std::ldexp(double(body & ((1u << f.mantissa) - 1)), -f.mantissa);
  double v = exponent ? std::ldexp(1 + fraction, exponent - f.bias) : std::ldexp(fraction, 1 - f.bias);
  if (int(body) > f.largest) v = int(body) == f.largest + 1 && f.bits > 8 ? INFINITY : NAN;
  return sign ? -v : v;
}

// To nearest, ties to even; too large ones become infinity, or in 8 bits the largest.
uint32_t code_of(double v, Float f) {
  const uint32_t sign = std::signbit(v) ? 1u << (f.bits - 1) : 0;
  if (v != v) return sign | uint32_t(f.largest + 2);
  const double a = std::fabs(v);
  const int exponent = a == 0 ? 1 - f.bias : std::max(std::isinf(a) ? 1000 : std::ilogb(a), 1 - f.bias);
  const double units = std::nearbyint(std::ldexp(a, f.mantissa - exponent));
  const double code = units + std::ldexp(double(exponent + f.bias - 1), f.mantissa);
  return sign | uint32_t(std::min(code, double(f.largest + (f.bits > 8))));
}

template <class T>
struct Type;
template <>
struct Type<float> {
  static constexpr DType dtype = DType::f32;
  static constexpr Float format = kF32;
  static constexpr const char* name = "float32";
};
template <>
struct Type<bf16> {
  static constexpr DType dtype = DType::bf16;
  static constexpr Float format = kBf16;
  static constexpr const char* name = "bfloat16";
};
template <>
struct Type<f16> {
  static constexpr DType dtype = DType::f16;
  static constexpr Float format = kF16;
  static constexpr const char* name = "float16";
};

std::vector<double> all_values(Float f) {
  std::vector<double> values;
  for (uint32_t code = 0; code < 1u << 16; code++) values.push_back(value_of(code, f));
  return values;
}
const std::vector<double> kBf16Values = all_values(kBf16), kF16Values = all_values(kF16);

double get(float v) { return v; }
double get(bf16 v) { return kBf16Values[v.bits]; }
double get(f16 v) { return kF16Values[v.bits]; }
template <class T>
T make(double v) {
  if constexpr (std::is_same_v<T, float>) return float(v);
  else return T{uint16_t(code_of(v, Type<T>::format))};
}
template <class T>
float rounded(double v) { return float(get(make<T>(v))); }

// Half a unit in the last place, relative
template <class T>
double rounding() { return std::ldexp(1.0, -1 - Type<T>::format.mantissa); }

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

template <class T>
bool near(T got, double truth, double error, int roundings = 1) {
  if (std::isinf(rounded<T>(truth))) return get(got) == rounded<T>(truth);
  const double bound = error * (1 + std::fabs(truth)) + roundings * rounding<T>() * std::fabs(truth) + 1e-7;
  return std::fabs(get(got) - truth) <= bound;
}

std::mt19937 generator;
float normal() { return std::normal_distribution<float>()(generator); }
int64_t below(int64_t n) { return int64_t(generator() % uint64_t(n)); }

template <class T>
std::vector<T> random(int64_t n, double scale = 1, double shift = 0) {
  std::vector<T> v(n);
  for (T& x : v) x = make<T>(scale * normal() + shift);
  return v;
}

// Memory as the engine gives it, filled with what shows if it is read.
template <class T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t n) {
    const size_t nbytes = (n * sizeof(T) + 127) / 64 * 64;
    data = static_cast<T*>(std::aligned_alloc(64, nbytes));
    std::memset(data, 0xff, nbytes);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
};

template <class F>
void for_types(F f) { f(float{}), f(bf16{}), f(f16{}); }

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// One step of a sum as the variant makes it
float add_product(float a, float b, float c) { return is_isa("portable") ? a * b + c : std::fma(a, b, c); }

// ---- linear ----

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

template <class T>
std::vector<T> strided_rows(int64_t m, int64_t k) {
  std::vector<T> x = random<T>(m * (k + 3));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = k; j < k + 3; j++) x[i * (k + 3) + j] = make<T>(NAN);
  return x;
}

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

// f(first, count): rows of a result, [count][width]; each as if it were alone, on 1 and 3 threads.
template <class T>
void check_rows_alone(const char* name, int64_t m, const std::function<std::vector<T>(int64_t, int64_t)>& f) {
  std::vector<T> alone;
  for (int64_t i = 0; i < m; i++)
    for (T v : f(i, 1)) alone.push_back(v);
  const int64_t width = int64_t(alone.size()) / m;
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    for (int64_t count : {int64_t(2), int64_t(5), int64_t(7), int64_t(25), m})
      for (int64_t first : {int64_t(0), m - count}) {
        const std::vector<T> want(alone.begin() + first * width, alone.begin() + (first + count) * width);
        check(same(f(first, count), want), "%s: rows %d + %d differ from each alone on %d threads", name,
              int(first), int(count), threads);
      }
  }
  set_num_threads(2);
}

template <class T>
std::vector<T> gated(const std::vector<T>& x, int64_t rows, int64_t dim, Gated kind) {
  std::vector<T> out(rows * dim);
  kernels().gated({x.data(), 2 * dim, out.data(), dim, rows, dim, kind, 0.0f, Type<T>::dtype});
  return out;
}

struct Product {
  int64_t m, n, k;
};

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

// ---- quantized weights ----

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

// ---- norms, elementwise, rotary ----

void test_norms() {
  for_types([&](auto t) {
    using T = decltype(t);
    constexpr DType dtype = Type<T>::dtype;
    for (int64_t dim : {1, 7, 8, 31, 64, 100, 576})
      for (float offset : {0.0f, 1.0f}) {
        const int64_t rows = 5, stride = dim + 3;
        const std::vector<T> x = random<T>(rows * stride, 1, 2), residual = random<T>(rows * dim),
                             w = random<T>(dim), bias = random<T>(dim);
        std::vector<T> out(rows * dim), sum(rows * dim), plain(rows * dim), layer(rows * dim);
        RmsNormArgs a = {x.data(), stride, 0, residual.data(), sum.data(), dim, w.data(), out.data(), dim,
                         0, rows, 1, dim, 1e-5f, offset, dtype};
        kernels().rms_norm(a);
        a.residual = nullptr, a.out = plain.data();
        kernels().rms_norm(a);
        kernels().layer_norm({x.data(), stride, nullptr, nullptr, 0, w.data(), bias.data(), layer.data(), dim, rows, dim, 1e-5f,
                              0.0f, dtype});
        for (int64_t i = 0; i < rows; i++) {
          double squares = 0, plain_squares = 0, mean = 0, variance = 0;
          for (int64_t j = 0; j < dim; j++) {
            const double v = get(x[i * stride + j]), total = get(sum[i * dim + j]);
            check(total == rounded<T>(float(v) + float(get(residual[i * dim + j]))), "residual sum %s",
                Type<T>::name);
            squares += total * total / double(dim), plain_squares += v * v / double(dim),
                mean += v / double(dim);
          }
          for (int64_t j = 0; j < dim; j++)
            variance += std::pow(get(x[i * stride + j]) - mean, 2) / double(dim);
          for (int64_t j = 0; j < dim; j++) {
            const double v = get(x[i * stride + j]), weight = get(w[j]) + offset;
            check(near(out[i * dim + j], get(sum[i * dim + j]) / std::sqrt(squares + 1e-5) * weight, 2e-6, 2),
                  "rms_norm with a residual, %s %d", Type<T>::name, int(dim));
            check(near(plain[i * dim + j], v / std::sqrt(plain_squares + 1e-5) * weight, 2e-6, 2),
                  "rms_norm %s %d", Type<T>::name, int(dim));
            check(near(layer[i * dim + j], (v - mean) / std::sqrt(variance + 1e-5) * get(w[j]) + get(bias[j]),
                       dim == 1 ? 1e-3 : 2e-5),
                  "layer_norm %s %d", Type<T>::name, int(dim));
          }
        }
      }
  });
}

double gelu(double x) { return 0.5 * x * (1 + std::erf(x * M_SQRT1_2)); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void test_elementwise() {
  const std::pair<Unary, double (*)(double)> functions[] = {
      {Unary::exp, [](double x) { return std::exp(x); }},
      {Unary::log, [](double x) { return std::log(x); }},
      {Unary::tanh, [](double x) { return std::tanh(x); }},
      {Unary::erf, [](double x) { return std::erf(x); }},
      {Unary::gelu, gelu},
      {Unary::gelu_tanh, gelu_tanh},
      {Unary::soft_cap, [](double x) { return 1.5 * std::tanh(x / 1.5); }},
      {Unary::relu, [](double x) { return x < 0 ? 0 : x; }},
      {Unary::scale, [](double x) { return 1.5 * x; }},
      {Unary::clamp, [](double x) { return std::clamp(x, -1.5, 1.5); }}};
  for_types([&](auto t) {
    using T = decltype(t);
    for (auto [kind, f] : functions)
      for (int64_t count : {1, 5, 1100}) {
        std::vector<T> x = random<T>(count, 4), out(count), some(count - count / 3);
        if (kind == Unary::log)
          for (T& v : x) v = make<T>(std::fabs(get(v)));
        kernels().unary({x.data(), out.data(), count, 1, count, 1.5f, kind, Type<T>::dtype});
        for (int64_t i = 0; i < count; i++)
          check(near(out[i], f(get(x[i])), 1e-6), "unary %d of %s %g is %g, not %g", int(kind), Type<T>::name,
                get(x[i]), get(out[i]), f(get(x[i])));
        // The same at another place
        const int64_t dim = some.size();
        kernels().unary({x.data() + count / 3, some.data(), dim, 1, dim, 1.5f, kind,
            Type<T>::dtype});
        check(same(some, std::vector<T>(out.begin() + count / 3, out.end())), "unary %d %s", int(kind),
            Type<T>::name);
      }
    for (int64_t dim : {1, 17, 1030}) {
      const std::vector<T> x = random<T>(3 * 2 * dim, 3), alphas = {make<T>(-0.5), make<T>(1.25)};
      const std::vector<T> silu = gated(x, 3, dim, Gated::silu), plain = gated(x, 3, dim, Gated::gelu),
                           tanh = gated(x, 3, dim, Gated::gelu_tanh), relu2 = gated(x, 3, dim, Gated::relu2);
      std::vector<T> xielu(x.size());
      kernels().xielu({x.data(), xielu.data(), dim, 6, dim, alphas.data(), Type<T>::dtype});
      const double positive = std::log1p(std::exp(-0.5)), negative = 0.5 + std::log1p(std::exp(1.25));
      for (size_t i = 0; i < x.size(); i++) {
        const double v = get(x[i]), rest = std::expm1(std::min(v, -1e-6)) - v;
        check(near(xielu[i], v / 2 + (v > 0 ? positive * v * v : negative * rest), 4e-6, 3), "xielu %s",
            Type<T>::name);
      }
      std::vector<T> sum(3 * dim);
      kernels().add({x.data(), x.data() + 3 * dim, sum.data(), dim, dim, dim, 3, dim, Type<T>::dtype});
      for (int64_t i = 0; i < 3 * dim; i++) {
        const double gate = get(x[i / dim * 2 * dim + i % dim]),
            up = get(x[i / dim * 2 * dim + dim + i % dim]);
        check(near(silu[i], gate / (1 + std::exp(-gate)) * up, 4e-6, 3) &&
                  near(plain[i], gelu(gate) * up, 4e-6, 3) &&
                  near(tanh[i], gelu_tanh(gate) * up, 4e-6, 3) &&
                  near(relu2[i], gate > 0 ? gate * gate * up : 0, 4e-6, 3),
              "gated %s", Type<T>::name);
        check(get(sum[i]) == rounded<T>(float(get(x[i])) + float(get(x[3 * dim + i]))), "add %s",
            Type<T>::name);
      }
    }
  });
  const float special[] = {-INFINITY, INFINITY, NAN, 88.8f, -104.1f, -0.0f};
  float out[6];
  kernels().unary({special, out, 6, 1, 6, 0, Unary::exp, DType::f32});
  check(out[0] == 0 && out[1] == INFINITY && out[2] != out[2] && out[3] == INFINITY &&
            out[4] == 0 && out[5] == 1,
        "exp of special numbers");
}

void test_rotary() {
  for_types([&](auto t) {
    using T = decltype(t);
    for (bool is_neox : {true, false})
      for (auto [head, dim] : {std::pair<int64_t, int64_t>{8, 8}, {80, 32}, {40, 22}}) {
        const int64_t tokens = 5, heads = 3, half = dim / 2;
        const std::vector<float> table = random<float>(9 * dim);
        const std::vector<int64_t> positions = {0, 8, 3, 3, 7};
        const std::vector<T> before = random<T>(tokens * heads * head);
        std::vector<T> x = before;  // two heads of queries, one of keys
        kernels().rotary({positions.data(), x.data(), heads * head, head, 2, x.data() + 2 * head,
                          heads * head, head, 1, table.data(), tokens, dim, is_neox, Type<T>::dtype});
        for (int64_t i = 0; i < tokens * heads; i++)
          for (int64_t d = 0; d < head; d++) {
            const T *from = before.data() + i * head, got = x[i * head + d];
            if (d >= dim) {
              check(get(got) == get(from[d]), "rotary changed the rest");
              continue;
            }
            const int64_t p = is_neox ? d % half : d / 2;
            const bool first = is_neox ? d < half : d % 2 == 0;
            const int64_t other = is_neox ? (first ? d + half : d - half) : d ^ 1;
            const float *cos = table.data() + positions[i / heads] * dim, *sin = cos + half;
            const double want = get(from[d]) * cos[p] + (first ? -1 : 1) * get(from[other]) * sin[p];
            check(near(got, want, 1e-6), "rotary %s", Type<T>::name);
          }
      }
  });
}

// ---- logits ----

void test_softmax() {
  for (int64_t dim : {1, 7, 64, 1003}) {
    const int64_t rows = 4;
    std::vector<float> x = random<float>(rows * dim, 5), out(rows * dim), log(rows * dim), largest(rows);
    std::vector<int64_t> at(rows);
    kernels().softmax({x.data(), dim, out.data(), rows, dim, false});
    kernels().softmax({x.data(), dim, log.data(), rows, dim, true});
    kernels().argmax({x.data(), dim, at.data(), rows, dim});
    x[dim - 1] = NAN;  // argmax passes over it, row_max does not
    kernels().row_max({x.data(), dim, largest.data(), rows, dim});
    check(largest[0] != largest[0], "row_max of a row with NaN is %g", largest[0]);
    for (int64_t i = 1; i < rows; i++) {
      const float* row = x.data() + i * dim;
      const float* top = std::max_element(row, row + dim);
      check(at[i] == top - row, "argmax");
      check(largest[i] == *top, "row_max");
      double sum = 0;
      for (int64_t j = 0; j < dim; j++) sum += std::exp(double(row[j]) - *top);
      for (int64_t j = 0; j < dim; j++) {
        const float difference = row[j] - *top;  // rounded, as by the kernels
        const double v = difference - std::log(sum);
        check(std::fabs(out[i * dim + j] - std::exp(v)) <= 2e-6 * std::exp(v) + 1e-38, "softmax %d",
            int(dim));
        check(near(log[i * dim + j], v, 1e-6), "log_softmax %d", int(dim));
      }
    }
  }
}

void test_sample() {
  constexpr int64_t rows = 200, dim = 700;
  std::vector<float> x = random<float>(rows * dim, 3);
  std::vector<SamplingRow> params(rows);
  for (int64_t i = 0; i < rows; i++)
    params[i] = {i % 10 ? 0.5f + 0.01f * float(i) : 0.0f, i % 3 ? 0.0f : 0.02f, i % 4 < 2 ? 1.0 : 0.8,
                 uint64_t(below(1 << 20)) << 20, uint32_t(i), 1, i % 5 < 2 ? 1 + below(40) : 0};
  x[dim + 3] = NAN;
  std::vector<int64_t> out(rows);
  kernels().sample({x.data(), dim, params.data(), out.data(), rows, dim});
  check(out[1] == -1, "a row with NaN was sampled");
  for (int64_t i = 0; i < rows; i++) {
    if (i == 1) continue;
    const float* row = x.data() + i * dim;
    const SamplingRow& p = params[i];
    std::vector<int64_t> rank(dim);
    for (int64_t j = 0; j < dim; j++) rank[j] = j;
    std::sort(rank.begin(), rank.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    if (p.temperature == 0) {
      check(out[i] == rank[0], "greedy sampling");
      continue;
    }
    // What every filter leaves; of that, the first to arrive, or nearly.
    std::vector<double> weight(dim);
    double total = 0, kept = 0;
    for (int64_t r = 0; r < dim; r++) {
      const double w = std::exp((double(row[rank[r]]) - row[rank[0]]) / p.temperature);
      if ((p.top_k > 0 && r >= p.top_k) || w < p.min_p) break;
      total += weight[rank[r]] = w;
    }
    for (int64_t r = 0; r < dim; r++) {
      if (kept >= p.top_p * total) weight[rank[r]] = 0;
      kept += weight[rank[r]];
    }
    std::vector<double> arrives(dim, INFINITY);
    for (int64_t j = 0; j < dim; j++) {
      const auto words = philox4x32({p.position, p.stream, uint32_t(j / 64 * 16 + j % 16), 0},
                                    {uint32_t(p.seed), uint32_t(p.seed >> 32)});
      if (weight[j] > 0)
        arrives[j] = -std::log(1 - (words[j % 64 / 16] + 0.5) * 0x1p-32) / weight[j];
    }
    check(arrives[out[i]] <= 1.00001 * *std::min_element(arrives.begin(), arrives.end()),
          "sample: token %d of row %d", int(out[i]), int(i));
  }
}

// ---- attention ----

struct Shape {
  int64_t heads, kv_heads, head_size, block_size, window;
  float soft_cap;
  bool alibi, sinks;
  int64_t chunk = 0;
};

template <class T>
struct Requests {
  Shape s;
  CacheType cache;
  std::vector<int64_t> lengths, queries;  // of each request: positions in all, the last of which ask
  std::vector<std::vector<T>> keys, values;  // [length][kv_heads][head_size]
  std::vector<T> query;  // [tokens][heads][head_size]
  std::vector<std::vector<int32_t>> blocks;
  std::vector<float> slopes;
  std::vector<T> sinks;
  Buffer<uint8_t> kv;

  Requests(Shape s, CacheType cache, std::vector<int64_t> lengths, std::vector<int64_t> queries)
      : s(s), cache(cache), lengths(lengths), queries(queries),
        kv(2 * s.kv_heads * s.block_size * cached_size(cache, Type<T>::dtype, s.head_size) * num_blocks()) {
    for (int64_t h = 0; h < s.heads; h++) slopes.push_back(std::ldexp(1.0f, -int(h) - 1));
    for (int64_t h = 0; h < s.heads; h++) sinks.push_back(make<T>(double(3 * h - 2)));
    std::vector<int32_t> order(num_blocks());
    for (size_t i = 0; i < order.size(); i++) order[i] = int32_t(i);
    std::shuffle(order.begin(), order.end(), generator);
    const int64_t width = s.kv_heads * s.head_size;
    for (size_t r = 0; r < lengths.size(); r++) {
      keys.push_back(random<T>(lengths[r] * width)), values.push_back(random<T>(lengths[r] * width));
      blocks.emplace_back();
      std::vector<int64_t> slots;
      for (int64_t i = 0; i < lengths[r]; i++) {
        if (i % s.block_size == 0) blocks[r].push_back(order.back()), order.pop_back();
        slots.push_back(blocks[r].back() * s.block_size + i % s.block_size);
      }
      kernels().write_kv({keys[r].data(), width, s.head_size, values[r].data(), width, s.head_size, kv.data,
                          block_stride(), slots.data(), lengths[r], s.kv_heads, s.head_size, s.head_size, s.block_size,
                          Type<T>::dtype, cache});
      const std::vector<T> q = random<T>(queries[r] * s.heads * s.head_size);
      query.insert(query.end(), q.begin(), q.end());
      for (auto* cached : {&keys[r], &values[r]})  // as the cache holds them
        for (int64_t i = 0; i < lengths[r] * s.kv_heads; i++) as_cached(cached->data() + i * s.head_size);
    }
  }

  int64_t num_blocks() const {
    int64_t n = 3;  // spare blocks
    for (int64_t length : lengths) n += (length + s.block_size - 1) / s.block_size;
    return n;
  }

  std::vector<float> int8_scales;  // of heads of tokens, in the order in which as_cached meets them

  void as_cached(T* head) {
    float most = 0;
    for (int64_t d = 0; d < s.head_size; d++) most = std::max(most, float(std::fabs(get(head[d]))));
    for (int64_t d = 0; d < s.head_size; d++) {
      const double v = get(head[d]);
      if (cache == CacheType::e4m3 || cache == CacheType::e5m2) {
        const Float f = cache == CacheType::e4m3 ? kE4m3 : kE5m2;
        head[d] = make<T>(value_of(code_of(v, f), f));
      } else if (cache == CacheType::int8) {
        head[d] = make<T>(std::nearbyint(float(v) * (127.0f / most)));
      }
    }
    if (cache == CacheType::int8) int8_scales.push_back(most / 127.0f);
  }

  // Requests first ... first + count, of which each leaves out its last `fewer` queries and positions.
  std::vector<T> run(int64_t first, int64_t count, int64_t fewer = 0) const {
    std::vector<int32_t> start = {0}, seq, table;
    size_t wide = 0;
    int64_t token = 0;
    for (const auto& b : blocks) wide = std::max(wide, b.size());
    std::vector<T> q;
    for (int64_t r = 0; r < first + count; r++) {
      if (r >= first) {
        const int64_t some = queries[r] - fewer;
        q.insert(q.end(), query.begin() + token * s.heads * s.head_size,
                 query.begin() + (token + some) * s.heads * s.head_size);
        start.push_back(start.back() + int32_t(some)), seq.push_back(int32_t(lengths[r] - fewer));
        table.insert(table.end(), blocks[r].begin(), blocks[r].end());
        table.resize(seq.size() * wide, 1 << 30);
      }
      token += queries[r];
    }
    std::vector<T> out(q.size());
    const int64_t width = s.heads * s.head_size;
    kernels().attention({q.data(), width, s.head_size, out.data(), width, s.head_size, kv.data, block_stride(),
                         start.data(), seq.data(), table.data(), int64_t(wide), count, s.heads, s.kv_heads, s.head_size,
                         s.head_size, s.block_size, false, true, s.window, s.chunk, scale(), s.soft_cap,
                         s.alibi ? slopes.data() : nullptr, nullptr, 0, nullptr, nullptr, 0, 0, nullptr, 0,
                         s.sinks ? sinks.data() : nullptr, nullptr, Type<T>::dtype, cache});
    return out;
  }

  // From a block of the cache to the next, in elements
  int64_t block_stride() const {
    const int64_t nbytes = cached_size(cache, Type<T>::dtype, s.head_size);
    return 2 * s.kv_heads * s.block_size * nbytes / (cache == CacheType::same ? size_of(Type<T>::dtype) : 1);
  }

  float scale() const { return 1 / std::sqrt(float(s.head_size)); }

  void check_all() const {
    const std::vector<T> out = run(0, int64_t(lengths.size()));
    int64_t at = 0, scales_before = 0;
    for (size_t r = 0; r < lengths.size(); r++) {
      for (int64_t i = 0; i < queries[r]; i++)
        for (int64_t h = 0; h < s.heads; h++, at += s.head_size)
          check_row(r, i, h, scales_before, out.data() + at, at);
      scales_before += 2 * lengths[r] * s.kv_heads;
    }
  }

  void check_row(size_t r, int64_t i, int64_t h, int64_t scales_before, const T* out, int64_t at) const {
    const int64_t position = lengths[r] - queries[r] + i, kv_head = h / (s.heads / s.kv_heads);
    const int64_t first = s.chunk    ? position / s.chunk * s.chunk
                          : s.window ? std::max<int64_t>(0, position - s.window + 1)
                                     : 0;
    std::vector<double> p, sum(s.head_size);
    double most = -INFINITY, total = 0, size = 0;
    auto scale_of = [&](int64_t j, bool value) -> double {
      if (cache != CacheType::int8) return 1;
      return int8_scales[scales_before + (value ? lengths[r] * s.kv_heads : 0) + j * s.kv_heads + kv_head];
    };
    for (int64_t j = first; j <= position; j++) {
      double dot = 0;
      for (int64_t d = 0; d < s.head_size; d++)
        dot += get(query[at + d]) * get(keys[r][(j * s.kv_heads + kv_head) * s.head_size + d]);
      dot *= scale_of(j, false) * scale();
      if (s.soft_cap != 0) dot = s.soft_cap * std::tanh(dot / s.soft_cap);
      if (s.alibi) dot += slopes[h] * double(j - position);
      p.push_back(dot), most = std::max(most, dot);
    }
    if (s.sinks) most = std::max(most, get(sinks[h])), total = std::exp(get(sinks[h]) - most);
    for (int64_t j = first; j <= position; j++) {
      const double e = std::exp(p[j - first] - most);
      total += e;
      for (int64_t d = 0; d < s.head_size; d++) {
        const double v = get(values[r][(j * s.kv_heads + kv_head) * s.head_size + d]) * scale_of(j, true);
        sum[d] += e * v, size = std::max(size, std::fabs(v));
      }
    }
    // With bfloat16 the probabilities may be, too.
    const double error = std::is_same_v<T, bf16> ? 0x1p-7 * size : 1e-5 * (1 + size);
    for (int64_t d = 0; d < s.head_size; d++) {
      const double want = sum[d] / total;
      check(std::fabs(get(out[d]) - want) <= error + 2 * rounding<T>() * std::fabs(want),
            "attention %s, cache %d, head size %d, block %d, window %d, request %d, query %d, head %d: "
            "%g, not %g",
            Type<T>::name, int(cache), int(s.head_size), int(s.block_size), int(s.window), int(r), int(i),
            int(h), get(out[d]), want);
    }
  }

  void check_alone() const {
    const int64_t width = s.heads * s.head_size;
    std::vector<T> all = run(0, int64_t(lengths.size())), alone;
    for (int64_t r = 0; r < int64_t(lengths.size()); r++)
      for (T v : run(r, 1)) alone.push_back(v);
    check(same(all, alone), "attention %s, cache %d: requests alone differ", Type<T>::name, int(cache));
    set_num_threads(3);
    check(same(run(0, int64_t(lengths.size())), all), "attention %s: on 3 threads", Type<T>::name);
    set_num_threads(2);
    // The first query of the longest prompt, by itself
    const int64_t fewer = queries[0] - 1;
    check(same(run(0, 1, fewer), std::vector<T>(all.begin(), all.begin() + width)),
          "attention %s, cache %d: one query differs from the same among others", Type<T>::name, int(cache));
  }
};

void test_attention() {
  const Shape shapes[] = {{4, 2, 64, 16, 0, 0, false, true},
                          {3, 1, 33, 8, 0, 0, true, false},
                          {2, 2, 40, 32, 70, 0, false, true},
                          {6, 2, 16, 64, 0, 2.5f, false, false},
                          {2, 1, 80, 128, 9, 0, true, false},
                          {2, 1, 32, 8, 0, 0, false, true, 41}};
  const CacheType caches[] = {CacheType::same, CacheType::e4m3, CacheType::e5m2, CacheType::int8};
  for_types([&](auto t) {
    using T = decltype(t);
    for (CacheType cache : caches)
      for (const Shape& shape : shapes) {
        if (cache != CacheType::same && shape.kv_heads > 1 && shape.head_size < 64) continue;  // takes long
        const Requests<T> requests(shape, cache, {70, 1, 131, 65, 7}, {20, 1, 1, 3, 7});
        requests.check_all();
        requests.check_alone();
      }
    // Segments that threads share
    const Requests<T> requests({2, 1, 24, 16, 0, 0, false, true}, CacheType::same, {1100}, {2});
    requests.check_all();
    requests.check_alone();
  });
}

// ---- LoRA adapters ----

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

void test_top_k() {
  const std::vector<float> x = {1, 5, NAN, 5, -2, 7};
  float values[4];
  int64_t at[4];
  kernels().top_k({x.data(), 6, values, at, 1, 6, 4});
  const int64_t want[] = {5, 1, 3, 0};
  check(std::equal(at, at + 4, want) && values[0] == 7 && values[3] == 1, "top_k");
}

void test_bitmask() {
  for (int64_t dim : {1, 31, 32, 33, 1000}) {
    const int64_t words = (dim + 31) / 32, indices[] = {2, 0};
    const std::vector<float> x = random<float>(3 * dim);
    std::vector<float> got = x, want = x;
    std::vector<int32_t> bitmask(2 * words);
    for (int32_t& word : bitmask) word = int32_t(generator());
    for (int64_t i = 0; i < 2 * dim; i++)
      if (!(uint32_t(bitmask[i / dim * words + i % dim / 32]) >> i % dim % 32 & 1))
        want[indices[i / dim] * dim + i % dim] = -INFINITY;
    kernels().apply_bitmask({got.data(), dim, 3, bitmask.data(), words, indices, 2, dim});
    check(same(got, want), "apply_bitmask of %d", int(dim));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::string& isa : available_isas()) std::printf("%s ", isa.c_str());
  std::printf("\n");
  set_num_threads(2);
  for (const std::string& isa : available_isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    generator.seed(1);
    if (!set_isa(isa)) std::abort();
    test_linears();
    test_conversions<bf16>();
    test_conversions<f16>();
    test_quantized();
    test_quantize_weight();
    test_norms();
    test_elementwise();
    test_rotary();
    test_softmax();
    test_sample();
    test_attention();
    test_lora();
    test_top_k();
    test_bitmask();
    test_fp8();
  }
  if (failures) std::printf("%d failures\n", failures);
  return failures > 0;
}
