// Elementwise functions: every element uses the same instructions, in a tail or not.
#pragma once
#include "norm.h"
#include "vmath.h"

OCTAVO_BEGIN

constexpr int64_t kPiece = 1024;  // elements of a task

// Calls f with the activation function of a gate.
template <class F>
INLINE void with_gate(Gated kind, F f) {
  switch (kind) {
    case Gated::none: return;
    case Gated::silu: return f([](vf x) { return silu(x); });
    case Gated::gelu: return f([](vf x) { return gelu(x); });
    case Gated::gelu_tanh: return f([](vf x) { return gelu_tanh(x); });
    case Gated::sigmoid: return f([](vf x) { return sigmoid(x); });
    case Gated::relu2: return f([](vf x) { return x > 0.0f ? x * x : vf{}; });
    case Gated::oai: return f([](vf x) { return x * sigmoid(1.702f * x); });
    case Gated::softplus: return f([](vf x) { return softplus(x); });
  }
}

// Calls f with the activation that follows a product, of numbers that are rounded to O first, as by
// a separate kernel.
template <class O, class F>
INLINE void with_activation(Unary kind, O, F f) {
  switch (kind) {
    case Unary::gelu: return f([](vf x) { return gelu(round_to(x, O{})); });
    case Unary::gelu_tanh: return f([](vf x) { return gelu_tanh(round_to(x, O{})); });
    case Unary::relu: return f([](vf x) { return relu(round_to(x, O{})); });
    case Unary::silu: return f([](vf x) { return silu(round_to(x, O{})); });
    default: return f([](vf x) { return x; });
  }
}

// Calls f with the function of gate and up, both rounded to T, as separate kernels round.
template <class T, class F>
INLINE void with_gated(Gated kind, float limit, T, F f) {
  const float one = kind == Gated::oai ? 1.0f : 0.0f;
  with_gate(kind, [&](auto act) {
    if (limit == 0.0f && one == 0.0f)
      return f([=](vf gate, vf up) { return round_to(act(gate), T{}) * up; });
    const float most = limit == 0.0f ? INFINITY : limit;
    f([=](vf gate, vf up) {
      gate = gate > most ? splat(most) : gate;
      return round_to(act(gate), T{}) * (clamp(up, -most, most) + one);
    });
  });
}

void gated(const GatedArgs& a) {
  const int64_t pieces = ceil_div(a.dim, kPiece);
  parallel_for(a.rows * pieces, a.rows * a.dim / W * 16, [&](int64_t task) {
    const int64_t row = task / pieces, start = task % pieces * kPiece;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* gate = static_cast<const T*>(a.x) + row * a.x_stride + start;
      const T* up = gate + a.dim;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
      with_gated(a.kind, a.limit, T{}, [&](auto f) {
        for_lanes(min(kPiece, a.dim - start), [&](int64_t i, int n) {
          store(out + i, f(load(gate + i, n), load(up + i, n)), n);
        });
      });
    });
  });
}

void unary(const UnaryArgs& a) {
  const int64_t total = a.rows * a.dim;
  const bool dense = a.out_stride == a.dim;  // all rows as one
  const int64_t rows = dense ? 1 : a.rows, dim = dense ? total : a.dim;
  const int64_t pieces = ceil_div(dim, kPiece);
  parallel_for(rows * pieces, total / W * 16, [&](int64_t task) {
    const int64_t row = task / pieces, start = task % pieces * kPiece;
    const int64_t count = min(kPiece, dim - start);
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* x = static_cast<const T*>(a.x) + row * dim + start;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
      auto apply = [&](auto f) __attribute__((flatten)) {
        for_lanes(count, [&](int64_t i, int n) { store(out + i, f(load(x + i, n)), n); });
      };
      switch (a.kind) {
        case Unary::none: return;
        case Unary::exp: return apply([](vf x) { return exp(x); });
        case Unary::log: return apply([](vf x) { return log(x); });
        case Unary::tanh: return apply([](vf x) { return tanh(x); });
        case Unary::erf: return apply([](vf x) { return erf(x); });
        case Unary::gelu: return apply([](vf x) { return gelu(x); });
        case Unary::gelu_tanh: return apply([](vf x) { return gelu_tanh(x); });
        case Unary::soft_cap: return apply([&](vf x) { return soft_cap(x, a.param); });
        case Unary::relu: return apply([](vf x) { return relu(x); });
        case Unary::sigmoid: return apply([](vf x) { return sigmoid(x); });
        case Unary::silu: return apply([](vf x) { return silu(x); });
        case Unary::scale: return apply([&](vf x) { return x * a.param; });
        case Unary::clamp:
          return apply([&](vf x) {
            x = x < -a.param ? splat(-a.param) : x;
            return x > a.param ? splat(a.param) : x;
          });
        case Unary::relu2: return apply([](vf x) { return x < 0.0f ? vf{} : x * x; });
      }
    });
  });
}

void clip(const ClipArgs& a) {
  parallel_for(a.rows, a.rows * a.dim / W * 2, [&](int64_t row) {
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      T* out = static_cast<T*>(a.out) + row * a.out_stride;
      for_lanes(a.dim, [&](int64_t i, int n) {
        vf v = load(x + i, n);
        v = v < a.bounds[0] ? splat(a.bounds[0]) : v;
        store(out + i, v > a.bounds[1] ? splat(a.bounds[1]) : v, n);
      });
    });
  });
}

// xIELU (arXiv:2411.13010) with a beta of 1/2 and an epsilon of -1e-6, as Apertus has them.
void xielu(const XieluArgs& a) {
  const bool dense = a.out_stride == a.dim;  // all rows as one
  const int64_t rows = dense ? 1 : a.rows, dim = dense ? a.rows * a.dim : a.dim;
  const int64_t pieces = ceil_div(dim, kPiece);
  parallel_for(rows * pieces, a.rows * a.dim / W * 16, [&](int64_t task) {
    const int64_t row = task / pieces, start = task % pieces * kPiece;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* x = static_cast<const T*>(a.x) + row * dim + start;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
      // log(1 + e^alpha), so written that it does not overflow
      const vf alpha = load(static_cast<const T*>(a.alphas), 2);
      const vf soft = (alpha > 0.0f ? alpha : vf{}) + log(1.0f + exp(-abs(alpha)));
      const float positive = soft[0], negative = soft[1] + 0.5f;
      for_lanes(min(kPiece, dim - start), [&](int64_t i, int n) {
        const vf v = load(x + i, n), low = v < -1e-6f ? v : splat(-1e-6f);
        // e^low - 1 - low: near 0 the terms of its series, as the difference would cancel
        const float c[] = {0.5f, 1 / 6.0f, 1 / 24.0f, 1 / 120.0f, 1 / 720.0f, 1 / 5040.0f, 1 / 40320.0f};
        const vf rest = low > -0.5f ? low * low * polynomial(c, low) : exp(low) - 1.0f - low;
        const vf factor = v > 0.0f ? positive * v * v : negative * (rest + (low - v));
        store(out + i, fma(splat(0.5f), v, factor), n);
      });
    });
  });
}

void add(const AddArgs& a) {
  const int64_t pieces = ceil_div(a.dim, kPiece);
  parallel_for(a.rows * pieces, a.rows * a.dim / W * 4, [&](int64_t task) {
    const int64_t row = task / pieces, start = task % pieces * kPiece;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride + start;
      const T* y = static_cast<const T*>(a.y) + row * a.y_stride + start;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
      for_lanes(min(kPiece, a.dim - start),
                [&](int64_t i, int n) { store(out + i, load(x + i, n) + load(y + i, n), n); });
    });
  });
}

void multiply(const MultiplyArgs& a) {
  norm_rows(a.rows, a.heads, a.dim, a.dtype, [&](auto t, int64_t row, int64_t head) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride;
    const T* factor =
        static_cast<const T*>(a.factor) + row * a.factor_stride + head * a.factor_head_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride + head * a.out_head_stride;
    auto apply = [&](auto f) {
      for_lanes(a.dim, [&](int64_t i, int n) {
        vf by = a.factor_step ? load(factor + i, n) : splat(float(load(factor, 1)[0]));
        store(out + i, load(x + i, n) * round_to(f(by), t), n);
      });
    };
    if (a.kind == Gated::none) return apply([](vf v) { return v; });
    with_gate(a.kind, apply);
  });
}

void sum_parts(const SumPartsArgs& a) {
  const int64_t pieces = ceil_div(a.dim, kPiece);
  parallel_for(a.rows * pieces, a.rows * a.dim / W * 4 * a.parts, [&](int64_t task) {
    const int64_t row = task / pieces, start = task % pieces * kPiece;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      const float* x = a.x + row * a.x_stride + start;
      const T* bias = a.bias ? static_cast<const T*>(a.bias) + start : nullptr;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
      for_lanes(min(kPiece, a.dim - start), [&](int64_t i, int n) {
        auto sum = load(x + i, n);
        for (int64_t part = 1; part < a.parts; part++) sum = sum + load(x + part * a.dim + i, n);
        if (bias) sum = sum + load(bias + i, n);
        store(out + i, sum, n);
      });
    });
  });
}

OCTAVO_END
