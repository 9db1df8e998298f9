// Changes that LoRA adapters make to the results of a linear layer (Hu et al., "LoRA", 2021), for rows
// of many adapters in one call (Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023).
//
// A row's order of sums depends on its own adapter only: the inputs are added in chunks of a fixed size,
// within a chunk in kChains interleaved sums, and the chunks' sums from first to last.
#pragma once
#include "norm.h"

OCTAVO_BEGIN

constexpr int64_t kLoraChunk = 512;  // inputs of a chunk
constexpr int64_t kFewLoraRows = 32;  // number of rows up to which threads share the parts of a product
constexpr int64_t kLoraAhead = 64;  // inputs whose rows of A are fetched ahead
constexpr int kChains = W == 16 ? 4 : 2;
constexpr int kShrinkRows = W == 16 ? 4 : 2;  // rows that share a load of A
constexpr int kExpandRows = W == 16 ? 4 : 1;  // rows that share a load of B
constexpr int kNormRows = 4;  // rows of a weight that share a load of A

// Adds the products of R rows of x with a chunk of 16 rows of A to `sums`.
//
// x: [R][kLoraChunk]. a: [k][16].
template <int R, class T>
INLINE void shrink(const float* x, const T* a, int64_t k, float* sums, int64_t stride) {
  constexpr int V = kLoraLanes / W;
  vf acc[kChains][R][V] = {};
  const auto add = [&](int c, int64_t i) {
    if (R == 1) __builtin_prefetch(a + (i + kLoraAhead) * kLoraLanes);
    UNROLL for (int v = 0; v < V; v++) {
      const vf w = load(a + i * kLoraLanes + v * W);
      UNROLL for (int r = 0; r < R; r++) acc[c][r][v] = fma(x[r * kLoraChunk + i], w, acc[c][r][v]);
    }
  };
  int64_t i = 0;
  for (; i + kChains <= k; i += kChains)
    UNROLL for (int c = 0; c < kChains; c++) add(c, i + c);
  for (int c = 0; i < k; i++, c++) add(c, i);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) {
      UNROLL for (int half = kChains / 2; half > 0; half /= 2)
        UNROLL for (int c = 0; c < half; c++) acc[c][r][v] += acc[c + half][r][v];
      float* sum = sums + r * stride + v * W;
      store(sum, load(sum) + acc[0][r][v]);
    }
}

// Adds the products of R rows of u with a panel of B to `width` numbers of R rows of the result. With
// kAffine, it then applies the panel of gains and offsets.
template <int R, bool kAffine, class T, class O>
INLINE void expand(const float* u, int64_t stride, const T* b, const float* affine, int64_t rank, O* out,
                   int64_t out_stride, int64_t width) {
  constexpr int V = kLoraPanel / W;
  vf acc[R][V] = {};
  for (int64_t i = 0; i < rank; i++) {
    const T* next = b + (i + rank) * kLoraPanel;  // of the next panel
    if (R == 1)
      for (int64_t j = 0; j < kLoraPanel; j += 64 / int64_t(sizeof(T))) __builtin_prefetch(next + j);
    UNROLL for (int v = 0; v < V; v++) {
      const vf w = load(b + i * kLoraPanel + v * W);
      UNROLL for (int r = 0; r < R; r++) acc[r][v] = fma(u[r * stride + i], w, acc[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) {
      const int64_t left = width - v * W;
      if (left <= 0) break;
      O* at = out + r * out_stride + v * W;
      vf sum = load(at, int(min<int64_t>(left, W))) + acc[r][v];
      if constexpr (kAffine) sum = fma(sum, load(affine + v * W), load(affine + kLoraPanel + v * W));
      store(at, sum, int(min<int64_t>(left, W)));
    }
}

// The parts of a call. `T` is the type of x and of the adapters, `O` that of the result.
template <class T, class O>
struct Lora {
  const LoraArgs& a;
  const int64_t padded = ceil_div(a.max_rank, kLoraLanes) * kLoraLanes;
  const int64_t stride = a.num_slices * padded;  // numbers of a row of u
  const int64_t chunks = ceil_div(a.k, kLoraChunk);

  INLINE explicit Lora(const LoraArgs& a) : a(a) {}

  const LoraSlice& slice(int64_t row, int64_t i) const { return a.slices[a.slots[row] * a.num_slices + i]; }

  // Calls f(first row, number) for runs of up to `most` of the rows [begin, end) with one adapter.
  template <class F>
  INLINE void for_runs(int64_t begin, int64_t end, int64_t most, F f) const {
    for (int64_t row = begin; row < end;) {
      int64_t next = row + 1;
      while (next < end && next - row < most && a.slots[next] == a.slots[row]) next++;
      if (a.slots[row] >= 0) f(row, next - row);
      row = next;
    }
  }

  // Adds the products of rows with one chunk of their adapters' A to rows of u.
  INLINE void add_chunk(int64_t begin, int64_t end, int64_t chunk, float* u) const {
    const int64_t from = chunk * kLoraChunk, size = min(kLoraChunk, a.k - from);
    alignas(64) float x[kShrinkRows * kLoraChunk];
    for_runs(begin, end, kShrinkRows, [&](int64_t row, int64_t count) {
      for (int64_t r = 0; r < count; r++) {
        const T* source = static_cast<const T*>(a.x) + (row + r) * a.x_stride + from;
        for_lanes(size, [&](int64_t i, int n) { store(x + r * kLoraChunk + i, load(source + i, n), n); });
      }
      for (int64_t i = 0; i < a.num_slices; i++) {
        const LoraSlice& s = slice(row, i);
        if (!s.a) continue;
        float* sums = u + (row - begin) * stride + i * padded;
        for (int64_t p = 0; p < s.rank; p += kLoraLanes, sums += kLoraLanes) {
          const T* panel = static_cast<const T*>(s.a) + p * a.k + from * kLoraLanes;
          if (count == kShrinkRows)
            shrink<kShrinkRows>(x, panel, size, sums, stride);
          else
            for (int64_t r = 0; r < count; r++)
              shrink<1>(x + r * kLoraChunk, panel, size, sums + r * stride, stride);
        }
      }
    });
  }

  // Adds the products of some rows of u with a panel of B to the result.
  INLINE void add_panel(int64_t row, int64_t count, const float* u, int64_t i, int64_t panel) const {
    const LoraSlice& s = slice(row, i);
    const int64_t col = a.bounds[i] + panel * kLoraPanel, width = min(kLoraPanel, a.bounds[i + 1] - col);
    const T* b = static_cast<const T*>(s.b) + panel * kLoraPanel * s.rank;
    const float* affine = s.affine ? s.affine + panel * 2 * kLoraPanel : nullptr;
    u += i * padded;
    O* out = static_cast<O*>(a.out) + row * a.out_stride + col;
    const auto run = [&]<bool kAffine>() {
      if (count == kExpandRows)
        return expand<kExpandRows, kAffine>(u, stride, b, affine, s.rank, out, a.out_stride, width);
      for (int64_t r = 0; r < count; r++)
        expand<1, kAffine>(u + r * stride, stride, b, affine, s.rank, out + r * a.out_stride, a.out_stride,
                           width);
    };
    affine ? run.template operator()<true>() : run.template operator()<false>();
  }

  int64_t panels(int64_t i) const { return ceil_div(a.bounds[i + 1] - a.bounds[i], kLoraPanel); }

  // Threads share the chunks of the first product, then the panels of the second one. Successive parts
  // are neighbours in memory.
  void share_parts(int64_t cost) const {
    struct {
      int64_t row, count;
    } runs[kFewLoraRows];
    int64_t num_runs = 0, numbers = a.rows * stride, all = 0;
    for_runs(0, a.rows, kExpandRows, [&](int64_t row, int64_t count) { runs[num_runs++] = {row, count}; });
    for (int64_t i = 0; i < a.num_slices; i++) all += panels(i);
    float* u = static_cast<float*>(scratch(chunks * numbers * sizeof(float)));
    parallel_for(num_runs * chunks, cost / 2, [&](int64_t task) {
      const auto [row, count] = runs[task / chunks];
      const int64_t chunk = task % chunks;
      float* part = u + chunk * numbers + row * stride;
      memset(part, 0, count * stride * sizeof(float));
      add_chunk(row, row + count, chunk, part);
    });
    for_runs(0, a.rows, 1, [&](int64_t row, int64_t) {
      for (int64_t i = 0; i < a.num_slices; i++) {
        float* sum = u + row * stride + i * padded;
        for_lanes(slice(row, i).rank, [&](int64_t j, int n) {
          vf total{};
          for (int64_t c = 0; c < chunks; c++) total += load(sum + c * numbers + j, n);
          store(sum + j, total * slice(row, i).scale, n);
        });
      }
    });
    parallel_for(num_runs * all, cost / 2, [&](int64_t task) {
      const auto [row, count] = runs[task / all];
      int64_t i = 0, panel = task % all;
      for (; panel >= panels(i); i++) panel -= panels(i);
      if (slice(row, i).a) add_panel(row, count, u + row * stride, i, panel);
    });
  }

  // Threads share blocks of rows.
  void share_rows(int64_t cost) const {
    parallel_for(ceil_div(a.rows, kFewLoraRows), cost, [&](int64_t task) {
      const int64_t begin = task * kFewLoraRows, end = min(a.rows, begin + kFewLoraRows);
      float* u = static_cast<float*>(scratch(kFewLoraRows * stride * sizeof(float), 1));
      memset(u, 0, (end - begin) * stride * sizeof(float));
      for (int64_t chunk = 0; chunk < chunks; chunk++) add_chunk(begin, end, chunk, u);
      for (int64_t i = 0; i < a.num_slices; i++) {
        for_runs(begin, end, 1, [&](int64_t row, int64_t) {
          float* sum = u + (row - begin) * stride + i * padded;
          for_lanes(slice(row, i).rank,
                    [&](int64_t j, int n) { store(sum + j, load(sum + j, n) * slice(row, i).scale, n); });
        });
        for (int64_t panel = 0; panel < panels(i); panel++)
          for_runs(begin, end, kExpandRows, [&](int64_t row, int64_t count) {
            if (slice(row, i).a) add_panel(row, count, u + (row - begin) * stride, i, panel);
          });
      }
    });
  }
};

// Returns the approximate number of vector operations of a call; 0: no row has an adapter.
INLINE int64_t lora_cost(const LoraArgs& a) {
  int64_t cost = 0;
  for (int64_t row = 0; row < a.rows; row++)
    if (a.slots[row] >= 0)
      for (int64_t i = 0; i < a.num_slices; i++) {
        const LoraSlice& slice = a.slices[a.slots[row] * a.num_slices + i];
        cost += slice.rank * (a.k + a.bounds[i + 1] - a.bounds[i]);
      }
  return ceil_div(cost, W);
}

void add_lora(const LoraArgs& a) {
  const int64_t cost = lora_cost(a);
  if (cost == 0) return;
  const auto run = [&](auto lora) {
    if (a.rows <= kFewLoraRows)
      lora.share_parts(cost);
    else
      lora.share_rows(cost);
  };
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.out_dtype == DType::f32)
      run(Lora<T, float>(a));
    else
      run(Lora<T, T>(a));
  });
}

// Writes the norms of R rows of w + b * A. A row's order of sums does not depend on the others.
template <int R, class T>
INLINE void changed_norms(const LoraNormsArgs& a, const T* w, const float* b, float* out) {
  vf squares[R] = {};
  for_lanes(a.k, [&](int64_t i, int n) {
    vf sum[R];
    UNROLL for (int r = 0; r < R; r++) sum[r] = load(w + r * a.w_stride + i, n);
    for (int64_t j = 0; j < a.rank; j++) {
      const vf part = load(a.a + j * a.k + i, n);
      UNROLL for (int r = 0; r < R; r++) sum[r] = fma(b[r * a.rank + j], part, sum[r]);
    }
    UNROLL for (int r = 0; r < R; r++) squares[r] = fma(sum[r], sum[r], squares[r]);
  });
  UNROLL for (int r = 0; r < R; r++) out[r] = std::sqrt(reduce_sum(squares[r]));
}

void lora_norms(const LoraNormsArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    const T* w = static_cast<const T*>(a.w);
    int64_t row = 0;
    for (; row + kNormRows <= a.rows; row += kNormRows)
      changed_norms<kNormRows>(a, w + row * a.w_stride, a.b + row * a.rank, a.out + row);
    for (; row < a.rows; row++) changed_norms<1>(a, w + row * a.w_stride, a.b + row * a.rank, a.out + row);
  });
}

// Packs the rows of a matrix in panels: [rows / panel][cols][panel], with zeros for missing rows.
void pack_lora(const PackLoraArgs& a) {
  with_type(a.src_dtype, [&](auto s) {
    with_type(a.dtype, [&](auto t) {
      using S = decltype(s);
      using T = decltype(t);
      const S* src = static_cast<const S*>(a.src);
      T* dst = static_cast<T*>(a.dst);
      for (int64_t first = 0; first < a.rows; first += a.panel, dst += a.panel * a.cols)
        for (int64_t col = 0; col < a.cols; col += W) {
          const int64_t count = min<int64_t>(W, a.cols - col);
          for (int64_t part = 0; part < a.panel; part += W) {
            vu v[W] = {};
            UNROLL for (int i = 0; i < W; i++) {
              const int64_t row = first + part + i;
              if (row < a.rows) v[i] = (vu)load(src + row * a.src_stride + col, int(count));
            }
            transpose(v);
            UNROLL for (int i = 0; i < W; i++)
              if (i < count) store(dst + (col + i) * a.panel + part, (vf)v[i]);
          }
        }
    });
  });
}

OCTAVO_END
