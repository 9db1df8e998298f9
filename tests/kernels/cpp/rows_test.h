// Norms, elementwise operations and rotary positions.
#pragma once
#include "checks.h"

namespace {

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

}  // namespace
