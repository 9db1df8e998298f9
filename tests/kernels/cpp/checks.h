// Numbers, memory and comparisons that the tests of the kernels share.
#pragma once
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

template <class T>
std::vector<T> strided_rows(int64_t m, int64_t k) {
  std::vector<T> x = random<T>(m * (k + 3));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = k; j < k + 3; j++) x[i * (k + 3) + j] = make<T>(NAN);
  return x;
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

}  // namespace
