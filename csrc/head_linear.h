// A product for each head with the head's own rows of one packed weight: the two products of
// multi-head latent attention. A panel on the border of two heads is multiplied by rows of both heads,
// and each head writes its own columns. Sums have the order of `linear`.
#pragma once
#include "linear.h"

OCTAVO_BEGIN

constexpr int64_t kHeadRows = 256;  // rows of x that share a pass over a head's weight
constexpr int64_t kFewHeadRows = 16;  // number of rows up to which threads share the panels of a head

// Calls f(head, first row, rows, first panel, end panel) for all parts of the product.
template <class F>
INLINE void for_heads(const HeadLinearArgs& a, int64_t most_rows, F f) {
  const int64_t blocks = ceil_div(a.rows, most_rows), panels = ceil_div(a.n, kPanel) + 1;
  const int64_t parts = a.rows <= kFewHeadRows ? panels : 1;
  const int64_t cost = a.heads * ceil_div(a.n, W) * max(a.rows, kFewHeadRows) * a.k;
  parallel_for(blocks * a.heads * parts, cost, [&](int64_t i) {
    const int64_t head = i / parts % a.heads, row = i / parts / a.heads * most_rows;
    const int64_t begin = head * a.n / kPanel, end = ceil_div((head + 1) * a.n, kPanel);
    const int64_t some = ceil_div(panels, parts), from = begin + i % parts * some;
    if (from < end) f(head, row, min(most_rows, a.rows - row), from, min(end, from + some));
  });
}

// Writes a head's columns of the sums c[rows][kPanel] of a panel.
template <class T>
INLINE void write_head(const HeadLinearArgs& a, T, int64_t head, int64_t row, int64_t rows,
                       int64_t panel, const float* c) {
  const int64_t from = max(panel * kPanel, head * a.n), to = min((panel + 1) * kPanel, (head + 1) * a.n);
  T* out = static_cast<T*>(a.out) + row * a.out_stride + head * a.out_head_stride + from - head * a.n;
  c += from - panel * kPanel;
  for (int64_t i = 0; i < rows; i++, out += a.out_stride, c += kPanel)
    for_lanes(to - from, [&](int64_t j, int n) { store(out + j, load(c + j, n), n); });
}

template <class T>
INLINE void head_linear_by_vectors(const HeadLinearArgs& a, T t) {
  using A = typename Panel<T>::A;
  const int64_t panel_k = padded_k<T>(a.k);
  for_heads(a, kRowBlock, [&](int64_t head, int64_t row, int64_t rows, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride;
    const A* from;
    int64_t stride = a.x_stride;
    if constexpr (std::is_same_v<T, A>) {
      from = x;
    } else {
      A* copy = static_cast<A*>(scratch(rows * a.k * sizeof(A), 2));
      for (int64_t i = 0; i < rows; i++)
        for_lanes(a.k, [&](int64_t d, int n) { store(copy + i * a.k + d, load(x + i * a.x_stride + d, n), n); });
      from = copy, stride = a.k;
    }
    alignas(64) float c[kRowBlock * kPanel];
    for (int64_t p = begin; p < end; p++) {
      const T* w = static_cast<const T*>(a.weight) + p * kPanel * panel_k;
      panel_product<T>(
          from, stride, w, rows, a.k, c, p + 1 < end ? w + kPanel * panel_k : nullptr,
          [](int64_t, int64_t) {},
          [&](int64_t i, int64_t n) { write_head(a, t, head, row + i, n, p, c + i * kPanel); });
    }
  });
}

#if defined(OCTAVO_TILES)
INLINE void head_linear_on_tiles(const HeadLinearArgs& a) {
  const int64_t steps = padded_k<bf16>(a.k) * sizeof(bf16) / kTileBytes, group_nbytes = steps * kTileNbytes;
  const char* weight = static_cast<const char*>(a.weight);
  for_heads(a, kHeadRows, [&](int64_t head, int64_t row, int64_t rows, int64_t begin, int64_t end) {
    const int64_t groups = ceil_div(rows, kTileRows16);
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride + head * a.x_head_stride;
    char* tiles = static_cast<char*>(scratch(groups * group_nbytes, 2));
    char* c = static_cast<char*>(scratch(groups * kStepNbytes, 1));
    for (int64_t g = 0; g < groups; g++)
      make_tiles(x + g * kTileRows16 * a.x_stride, a.x_stride,
                 min<int64_t>(kTileRows16, rows - g * kTileRows16), a.k, tiles + g * group_nbytes);
    const int64_t depth = groups == 1 ? steps : kDepth;
    configure_tiles();
    for (int64_t p = begin; p < end; p++) {
      for (int64_t from = 0; from < steps; from += depth) {
        const char* w = weight + (p * steps + from) * kStepNbytes;
        tile_block<DotBf16, kStepNbytes / 64>(tiles + from * kTileNbytes, group_nbytes, w,
                                              min(depth, steps - from), groups, c, from == 0,
                                              w + depth * kStepNbytes);
      }
      write_head(a, bf16{}, head, row, rows, p, reinterpret_cast<const float*>(c));
    }
    release_tiles();
  });
}
#endif

void head_linear(const HeadLinearArgs& a) {
  with_type(a.dtype, [&](auto t) {
#if defined(OCTAVO_TILES)
    if constexpr (std::is_same_v<decltype(t), bf16>)
      head_linear_on_tiles(a);
    else
#endif
      head_linear_by_vectors(a, t);
  });
}

OCTAVO_END
