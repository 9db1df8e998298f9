// out = x * weight^T + bias with weights packed once.
//
// A packed weight is a list of panels of kPanel outputs (the last one padded with zeros). Within a
// panel K varies slowest, so that a product streams through memory. bfloat16 interleaves two steps
// of K, for the dot products of AVX-512 and ARM; a shift and a mask separate them. Its K is padded
// with zeros to a multiple of 32, since tiles (gemm_tiles.h) read 32 at once:
//   float32, float16: [n / kPanel][k][kPanel]      bfloat16: [n / kPanel][padded k / 2][kPanel][2]
//
// Every output is accumulated in float32 along K from first to last, for every m. K is cut into
// blocks for the caches only: storing and reloading the accumulators changes no bit.
#pragma once
#include "activation.h"

OCTAVO_BEGIN

constexpr int kVectors = 4;  // vectors of a panel
constexpr int kPanel = kVectors * W;
// Rows at once of a weight of type T, limited by registers. Widening 16 bits uses some.
template <class T>
constexpr int kRows = kRegisters == 32 ? 6 : W == 8 && sizeof(T) == 4 ? 3 : 2;
constexpr int kStreamed = 2;  // maximum number of rows that leave memory the bottleneck
constexpr int kPastCachesAhead = 2048, kStreamAhead = 4096;  // bytes
constexpr int kRowBlock = 96;  // rows of x that share one pass over a panel
constexpr int kMostRows = 2 * kRowBlock;  // of a plain weight, each of whose panels has more bytes

// Multiplication of a panel of storage type T by x. `A`: type that x is read as; `kStep`: steps of
// K at once.
template <class T>
struct Panel {
  using A = float;
  static constexpr int kStep = 1;
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const float* x, int64_t stride, const T* w) {
    vf b[kVectors];
    UNROLL for (int j = 0; j < kVectors; j++) b[j] = load(w + j * W);
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < kVectors; j++) acc[i][j] = fma(x[i * stride], b[j], acc[i][j]);
  }
};

template <>
struct Panel<bf16> {
  static constexpr int kStep = 2;
#if defined(OCTAVO_DOT_BF16)
  using A = bf16;
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const bf16* x, int64_t stride, const bf16* w) {
    UNROLL for (int i = 0; i < R; i++) {
      const vu a = (vu)splat_int(load_raw<int>(x + i * stride));
      UNROLL for (int j = 0; j < kVectors; j++)
        acc[i][j] = dot_bf16(acc[i][j], a, load_raw<vu>(w + 2 * j * W));
    }
  }
#else
  using A = float;
  template <int R>
  static INLINE void step(vf (&acc)[R][kVectors], const float* x, int64_t stride, const bf16* w) {
    UNROLL for (int odd = 0; odd < 2; odd++)
      UNROLL for (int j = 0; j < kVectors; j++) {  // outer loop, so that one vector of weights is live
        const vu pair = load_raw<vu>(w + 2 * j * W);
        const vf b = (vf)(odd ? pair & 0xffff0000u : pair << 16);
        UNROLL for (int i = 0; i < R; i++) acc[i][j] = fma(x[i * stride + odd], b, acc[i][j]);
      }
  }
#endif
};

// K in a packed weight
template <class T>
INLINE int64_t padded_k(int64_t k) {
  constexpr int64_t multiple = std::is_same_v<T, bf16> ? 32 : 1;
  return ceil_div(k, multiple) * multiple;
}

template <class T>
constexpr int kLine = 64 / sizeof(T);  // numbers in a cache line
template <class T>
constexpr int kLines = kPanel * Panel<T>::kStep / kLine<T>;  // cache lines that a step reads
// Steps of K at once: a block of a panel stays in L1, for more than kShortRows rows of AVX-512 in L2.
// There each vector of weights is multiplied by so many rows that reading it from L2 is fast enough,
// and not storing and loading the sums saves more. Few rows read a panel only once or twice.
constexpr int64_t kShortRows = 24;
template <class T>
INLINE int64_t block_of(int64_t rows) {
  const int64_t nbytes = W == 16 && rows > kShortRows ? 393216 : 16384;
  return nbytes / int64_t(kPanel * sizeof(T));
}

// Number of cache lines prefetched in each step, and their locality.
template <int Lines, int Locality>
struct Fetch {
  static constexpr int lines = Lines, locality = Locality;
};

// c[R][kPanel] += x[R][k] * w[k][kPanel], where c counts as zero if `begins`; meanwhile prefetches
// weights from `ahead` as F specifies.
template <class T, int R, class F>
void micro_kernel(const typename Panel<T>::A* x, int64_t stride, const T* w, int64_t k, bool begins,
                  float* c, const T* ahead) {
  using A = typename Panel<T>::A;
  constexpr int step = Panel<T>::kStep;
  vf acc[R][kVectors] = {};
  if (!begins)
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < kVectors; j++) acc[i][j] = load(c + i * kPanel + j * W);
  int64_t p = 0;
  for (; p + step <= k; p += step, w += step * kPanel) {
    UNROLL for (int i = 0; i < F::lines; i++)
      __builtin_prefetch(ahead + i * kLine<T>, 0, F::locality);
    ahead += F::lines * kLine<T>;
    Panel<T>::template step<R>(acc, x + p, stride, w);
  }
  if (p < k) {  // a partial last step: weights are padded with zeros, x is not
    A rest[R][step] = {};
    for (int i = 0; i < R; i++)
      for (int64_t more = 0; p + more < k; more++) rest[i][more] = x[p + more + i * stride];
    Panel<T>::template step<R>(acc, rest[0], step, w);
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < kVectors; j++) store(c + i * kPanel + j * W, acc[i][j]);
}

template <class T, class F, int R>
INLINE void micro_kernels(int rows, const typename Panel<T>::A* x, int64_t stride, const T* w,
                          int64_t k, bool begins, float* c, const T* ahead) {
  if (rows == R) return micro_kernel<T, R, F>(x, stride, w, k, begins, c, ahead);
  if constexpr (R > 1) micro_kernels<T, F, R - 1>(rows, x, stride, w, k, begins, c, ahead);
}

// Calls begin(first, number) for the rows of the pass after that of row i, and, if i is 0, for those
// of this pass too. A pass is too short for memory to arrive in.
template <class F>
INLINE void begin_pass(int64_t i, int64_t some, int64_t rows, F begin) {
  const int64_t from = i == 0 ? 0 : i + some, to = min(rows, i + 2 * some);
  if (from < to) begin(from, to - from);
}

// c[rows][kPanel] = x[rows][k] * w[k][kPanel], block by block of K. A block stays in a cache for all
// rows. Meanwhile the next one is prefetched, at the end `after`, if not null. So reading a weight
// overlaps computing, which matters most for 8 to 64 rows, where both take about equally long. One
// or two rows use a weight once: if the processor supports it, the weight bypasses the caches and
// evicts nothing. `finish(i, n)` is called when the sums of rows i ... i + n are complete, which are
// still in L1 then; `begin(i, n)` some time before.
template <class T, class B, class F>
INLINE void panel_product(const typename Panel<T>::A* x, int64_t stride, const T* w, int64_t rows,
                          int64_t k, float* c, const T* after, B begin, F finish) {
  const int64_t passes = ceil_div(rows, kRows<T>), some = ceil_div(rows, passes);
  const int64_t steps = block_of<T>(rows);
  for (int64_t from = 0; from < k; from += steps) {
    const int64_t depth = min<int64_t>(steps, k - from);
    const T* block = w + from * kPanel;
    const T* ahead = from + depth < k ? block + depth * kPanel : after;
    for (int64_t i = 0; i < rows; i += some) {
      const int n = int(min(some, rows - i));
      const bool last = from + depth == k;
      if (last) begin_pass(i, some, rows, begin);
      auto pass = [&](auto fetched) {
        micro_kernels<T, decltype(fetched), kRows<T>>(n, x + i * stride + from, stride, block, depth,
                                                      from == 0, c + i * kPanel, ahead);
      };
      constexpr int half = kLines<T> > 1 ? kLines<T> / 2 : 1;  // prefetched in a pass, if there are several
      if (rows <= kStreamed) {
        ahead = block + (tuning.past_caches ? kPastCachesAhead : kStreamAhead) / sizeof(T);
        if (tuning.past_caches)
          pass(Fetch<kLines<T>, 0>{});
        else
          pass(Fetch<kLines<T>, 2>{});
      } else if (ahead && passes == 1) {
        pass(Fetch<kLines<T>, 2>{});
      } else if (ahead && i < kLines<T> / half * some) {
        pass(Fetch<half, 2>{});
        ahead += depth * kPanel / (kLines<T> / half);
      } else {
        pass(Fetch<0, 0>{});
      }
      if (last) finish(i, n);
    }
  }
}

// Writes act(sums + bias).
template <class T, class O, class F>
void write_rows(const float* c, const T* bias, O* out, int64_t stride, int64_t rows, int64_t cols, F act) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j += W) {
      int n = int(min<int64_t>(W, cols - j));
      vf v = load(c + i * kPanel + j);
      if (bias) v += load(bias + j, n);
      store(out + i * stride + j, act(v), n);
    }
}

// Writes act(gate) * up like write_rows; all three are rounded to T, as in separate kernels.
template <class T>
void write_gated(const float* gate, const float* up, const T* gate_bias, const T* up_bias, Gated kind,
                 float limit, T* out, int64_t stride, int64_t rows) {
  with_gated(kind, limit, T{}, [&](auto f) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < kPanel; j += W) {
        vf g = load(gate + i * kPanel + j), u = load(up + i * kPanel + j);
        if (gate_bias) g += load(gate_bias + j), u += load(up_bias + j);
        store(out + i * stride + j, f(round_to(g, T{}), round_to(u, T{})));
      }
  });
}

// Writes sums of the panel at column col and, if gated, of its other half. Not inlined: several
// places of a product call it.
template <class T, class Args>
NOINLINE void write_panel(const Args& a, T, const float* c, const float* up, int64_t col, void* out,
                        int64_t stride, int64_t rows) {
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + col : nullptr;
  if (up)
    return write_gated(c, up, bias, bias ? bias + a.n / 2 : nullptr, a.gated, a.limit,
                       static_cast<T*>(out), stride, rows);
  const int64_t cols = min<int64_t>(kPanel, a.n - col);
  if (a.activation != Unary::none)
    return with_activation(a.activation, T{}, [&](auto act) {
      write_rows(c, bias, static_cast<T*>(out), stride, rows, cols, act);
    });
  with_type(a.out_dtype, [&](auto o) {
    write_rows(c, bias, static_cast<decltype(o)*>(out), stride, rows, cols, [](vf x) { return x; });
  });
}

// Prefetches a panel of outputs for writing: its rows are in different pages, and stores wait for them.
INLINE void prefetch_rows(const void* out, int64_t stride, int64_t rows, DType dtype) {
  const char* at = static_cast<const char*>(out);
  for (int64_t i = 0; i < rows; i++, at += stride * size_of(dtype))
    for (int64_t j = 0; j < kPanel * size_of(dtype); j += 64) __builtin_prefetch(at + j, 1);
}

// Returns the number of panels of outputs that a product computes.
template <class Args>
INLINE int64_t panels_of(const Args& a) {
  return a.num_panels ? a.num_panels : ceil_div(a.gated == Gated::none ? a.n : a.n / 2, kPanel);
}

// Cuts a product into tasks of some rows, at most product.most, and one panel of outputs.
// `product(first, rows, col, c, next, begin, finish)` stores rows first ... of this product times the
// panel at column col in c [rows][kPanel]. It calls begin(i, n) shortly before and finish(i, n) after
// the sums of the rows i ... i + n of these are complete. The panel at column next follows; -1:
// unknown. Row 0 is the row0-th row of out.
template <class T, class Args, class F>
INLINE void for_tiles(const Args& a, T t, int64_t row0, int64_t m, int64_t cost, F product) {
  const bool gated = a.gated != Gated::none;
  const int64_t half = a.n / 2, panels = panels_of(a), first_col = a.first_panel * kPanel;
  // Narrow weights have too few panels to keep all threads busy to the end: use fewer rows at once.
  const int64_t parts = ceil_div(8 * num_threads(), panels);
  constexpr int64_t whole = 4 * kRows<float>;  // divisible by the rows at once of all types
  const int64_t some = ceil_div(max<int64_t>(1, ceil_div(m, parts)), whole) * whole;
  const int64_t block = min<int64_t>(gated ? kRowBlock : F::most, some);
  parallel_for(panels * ceil_div(m, block), cost, [&](int64_t task, int64_t next_task) {
    const int64_t first = task / panels * block, rows = min(block, m - first);
    const int64_t col = first_col + task % panels * kPanel;
    const int64_t next = next_task < 0 ? -1 : first_col + next_task % panels * kPanel;
    char* out = static_cast<char*>(a.out) + (row0 + first) * a.out_stride * size_of(a.out_dtype) +
                col * size_of(a.out_dtype);
    auto row = [&](int64_t i) { return out + i * a.out_stride * size_of(a.out_dtype); };
    auto fetch = [&](int64_t i, int64_t n) { prefetch_rows(row(i), a.out_stride, n, a.out_dtype); };
    if (gated) {
      alignas(64) float c[kRowBlock * kPanel], up[kRowBlock * kPanel];
      auto none = [](int64_t, int64_t) {};
      product(first, rows, col, c, half + col, none, none);
      return product(first, rows, half + col, up, next, fetch, [&](int64_t i, int64_t n) {
        write_panel(a, t, c + i * kPanel, up + i * kPanel, col, row(i), a.out_stride, n);
      });
    }
    alignas(64) float c[F::most * kPanel];
    product(first, rows, col, c, next, fetch, [&](int64_t i, int64_t n) {
      write_panel(a, t, c + i * kPanel, nullptr, col, row(i), a.out_stride, n);
    });
  });
}

// A product of for_tiles with a quantized weight: f(first, rows, col, c, begin, finish).
template <class F>
struct QuantizedProduct {
  static constexpr int64_t most = kRowBlock;
  F f;
  template <class B, class E>
  INLINE void operator()(int64_t first, int64_t rows, int64_t col, float* c, int64_t, B begin, E finish) {
    f(first, rows, col, c, begin, finish);
  }
};
template <class F>
INLINE QuantizedProduct<F> quantized_tiles(F f) {
  return {f};
}
// One that computes the sums of all rows before any is written: f(first, rows, col, c).
template <class F>
INLINE auto whole_sums(F f) {
  return quantized_tiles([=](int64_t first, int64_t rows, int64_t col, float* c, auto begin, auto finish) {
    begin(0, rows);
    f(first, rows, col, c);
    finish(0, rows);
  });
}

// A product of for_tiles with a plain weight, that writes rows while their sums are in L1.
template <class A, class T>
struct PlainProduct {
  static constexpr int64_t most = kMostRows;
  const A* x;
  int64_t x_stride, k;
  const T* weight;
  template <class B, class E>
  INLINE void operator()(int64_t first, int64_t rows, int64_t col, float* c, int64_t next, B begin, E finish) {
    const int64_t panel_k = padded_k<T>(k);
    panel_product<T>(x + first * x_stride, x_stride, weight + col * panel_k, rows, k, c,
                     next < 0 ? nullptr : weight + next * panel_k, begin, finish);
  }
};

// Multiplies rows of x, which is x itself or float32 copies.
template <class A, class T>
void linear_rows(const LinearArgs& a, const A* x, int64_t x_stride, int64_t row0, int64_t m) {
  const int64_t cost = ceil_div(a.n, kPanel) * kVectors * m * a.k;
  for_tiles(a, T{}, row0, m, cost,
            PlainProduct<A, T>{x, x_stride, a.k, static_cast<const T*>(a.weight)});
}

// Copies some rows of x at a time to float32, for a processor that cannot multiply T, and calls
// f(copy, row0, m) for them: the copy of rows row0 ... row0 + m is dense.
template <class T, class Args, class F>
INLINE void with_float_rows(const Args& a, T, F f) {
  constexpr int64_t some = kMostRows;
  const T* x = static_cast<const T*>(a.x);
  float* copy = static_cast<float*>(scratch(min(a.m, some) * a.k * sizeof(float)));
  for (int64_t row0 = 0; row0 < a.m; row0 += some) {
    const int64_t m = min(some, a.m - row0);
    parallel_for(m, m * a.k / W, [&](int64_t i) {
      const T* from = x + (row0 + i) * a.x_stride;
      for (int64_t k = 0; k < a.k; k += W) {
        int n = int(min<int64_t>(W, a.k - k));
        store(copy + i * a.k + k, load(from + k, n), n);
      }
    });
    f(copy, row0, m);
  }
}

template <class T>
INLINE void linear_typed(const LinearArgs& a, T t) {
  if constexpr (std::is_same_v<T, typename Panel<T>::A>)
    linear_rows<T, T>(a, static_cast<const T*>(a.x), a.x_stride, 0, a.m);
  else
    with_float_rows(a, t, [&](const float* x, int64_t row0, int64_t m) {
      linear_rows<float, T>(a, x, a.k, row0, m);
    });
}

// Packs by a tile of 128 steps of K, which fits in L1: rows are read and written in whole cache
// lines.
template <class S, class T>
INLINE void pack_typed(const PackArgs& a, S, T) {
  constexpr int step = Panel<T>::kStep, run = 128;
  struct Group {
    T values[step];  // interleaved values
  };
  const int64_t panel_k = padded_k<T>(a.k);
  const int64_t end = a.row0 + a.rows;
  const int64_t first = a.row0 / kPanel, panels = ceil_div(end, kPanel) - first;
  parallel_for(panels, panels * panel_k, [&](int64_t task) {
    const int64_t col = (first + task) * kPanel;
    T* panel = static_cast<T*>(a.dst) + col * panel_k;
    const int64_t from = max(col, a.row0), to = min(col + kPanel, end);
    const int64_t zeros = to == a.n ? col + kPanel : to;  // the last row writes the padding
    alignas(64) Group tile[kPanel][run / step] = {};
    for (int64_t k0 = 0; k0 < panel_k; k0 += run) {
      const int64_t depth = min<int64_t>(run, a.k - k0), whole = min<int64_t>(run, panel_k - k0);
      for (int64_t n = from; n < to; n++) {
        const S* row = static_cast<const S*>(a.src) + (n - a.row0) * a.src_stride + k0;
        T* values = tile[n - col][0].values;
        if constexpr (std::is_same_v<S, T>)
          memcpy(values, row, depth * sizeof(T));
        else
          for_lanes(depth, [&](int64_t i, int m) { store(values + i, load(row + i, m), m); });
        for (int64_t k = depth; k < whole; k++) values[k] = T{};
      }
      Group* out = reinterpret_cast<Group*>(panel + k0 * kPanel);
      for (int64_t g = 0; g < whole / step; g++)
        for (int64_t n = from - col; n < zeros - col; n++) out[g * kPanel + n] = tile[n][g];
    }
  });
}

void pack_weight(const PackArgs& a) {
  with_type(a.dtype, [&](auto t) {
    with_type(a.src_dtype, [&](auto s) { pack_typed(a, s, t); });
  });
}

// Reads rows of a table or a packed weight: an embedding tied to the LM head needs no second copy.
template <class T>
INLINE void gather_typed(const GatherArgs& a, T) {
  constexpr int step = Panel<T>::kStep;
  const int64_t panel_k = padded_k<T>(a.dim);
  parallel_for(a.rows, a.rows * a.dim / step, [&](int64_t i) {
    const int64_t id = a.ids[i];
    T* out = static_cast<T*>(a.out) + i * a.dim;
    if (id < 0 || id >= a.n) {
      for_lanes(a.dim, [&](int64_t k, int lanes) { store(out + k, splat(NAN), lanes); });
      return;
    }
    if (!a.packed) {
      memcpy(out, static_cast<const T*>(a.table) + id * a.table_stride, a.dim * sizeof(T));
      return;
    }
    const T* column = static_cast<const T*>(a.table) + id / kPanel * kPanel * panel_k +
                      id % kPanel * step;
    for (int64_t k = 0; k < a.dim; k++) out[k] = column[k / step * step * kPanel + k % step];
  });
}

void gather(const GatherArgs& a) {
  with_type(a.dtype, [&](auto t) { gather_typed(a, t); });
}

OCTAVO_END
