// Attention's two products on tile registers (tile.h), for bfloat16: scores of 16 or 32 rows with
// keys, and probabilities times values. The cache stores keys as tile registers need them, 16 pairs
// of dimensions of 16 keys. Only blocks of 8 and head sizes that are no multiple of 32 are copied.
// Values are paired while they are copied, once for all rows of a task.
//
// Each sum has one order, whatever the adjacent rows and columns contain. A position that is
// invisible to a row has probability zero, which adds a zero if its value is finite. This can only
// change the sign of a sum that is zero, so writing removes the sign. If a value is not finite and
// not visible to all rows, each row is multiplied alone with its visible positions.
//
// Latents are rows. Their scores are computed transposed, rows times queries, since the left factor
// needs no pairs.
#pragma once
#include "norm.h"
#include "tile.h"

OCTAVO_BEGIN

// True if attention of type T uses tile registers: for a model always or never.
template <class T>
constexpr bool kOnTiles = false;

constexpr int kPositionsOnTiles = 128;  // per step of the softmax
constexpr int kRowsOnTiles = 128;  // rows that share paired values
constexpr int kStepRowsOnTiles = 32;  // rows that share the tile registers
constexpr int kFetchTo = 2;  // prefetch locality: L2 has room for one more tile

// Products of type T.
template <class T>
struct OnTiles;

template <int I>
struct Index {
  static constexpr int value = I;
};
// Calls f(Index<0>), ... f(Index<N - 1>).
template <int N, class F>
INLINE void for_each_index(F f) {
  if constexpr (N > 0) {
    for_each_index<N - 1>(f);
    f(Index<N - 1>{});
  }
}

#if defined(OCTAVO_EMULATED_TILES) || defined(__AMX_TILE__)
template <>
constexpr bool kOnTiles<bf16> = true;

// c[G * 16][V * 16] = or, with Add, += a[G * 16][32 * steps] * b. b(step, j): address of 16 pairs
// along K of the j-th 16 columns. Strides count elements. A stride of 0 repeats one row 16 times.
template <int G, int V, bool Add, class B>
INLINE void tile_product(const bf16* a, int64_t a_stride, int64_t steps, B b, int64_t b_stride,
                         float* c, int64_t c_stride) {
  static_assert(G * V <= 4 && G <= 2);
  auto place = [=](int g, int j) { return c + g * 16 * c_stride + j * 16; };
  for_each_index<G>([&](auto g) {
    for_each_index<V>([&](auto j) {
      constexpr int G0 = decltype(g)::value, J = decltype(j)::value;
      if constexpr (Add)
        tile_load<G0 * V + J>(place(G0, J), c_stride * sizeof(float));
      else
        tile_zero<G0 * V + J>();
    });
  });
  for (int64_t k = 0; k < steps; k++) {
    for_each_index<G>([&](auto g) {
      constexpr int G0 = decltype(g)::value;
      tile_load<4 + G0>(a + G0 * 16 * a_stride + k * 32, a_stride * sizeof(bf16));
    });
    for_each_index<V>([&](auto j) {
      constexpr int J = decltype(j)::value, columns = 4 + G + J % (4 - G);
      tile_load<columns>(b(k, J), b_stride * sizeof(bf16));
      for_each_index<G>([&](auto g) {
        constexpr int G0 = decltype(g)::value;
        tile_dot_bf16<G0 * V + J, 4 + G0, columns>();
      });
    });
  }
  for_each_index<G>([&](auto g) {
    for_each_index<V>([&](auto j) {
      constexpr int G0 = decltype(g)::value, J = decltype(j)::value;
      tile_store<G0 * V + J>(place(G0, J), c_stride * sizeof(float));
    });
  });
}

template <>
struct OnTiles<bf16> {
  using P = bf16;
  static constexpr int kPositions = kPositionsOnTiles;

  // The tile registers belong to a thread during the lifetime of this object.
  OnTiles() { configure_tiles(); }
  ~OnTiles() { release_tiles(); }

  // Buffers for the keys and values of a tile that need another layout. `width`: the head size,
  // padded.
  bf16* keys;  // [kPositions / 16][width / 2][16][2]
  bf16* values;  // [kPositions / 32][width / 16][16][16][2]; of 32 dimensions first the even ones

  // Loads the first n of 32 numbers; the others are zero.
  static INLINE vu row(const bf16* v, int64_t n) {
    if (n >= 32) return load_raw<vu>(v);
    vu some{};
    memcpy(&some, v, n * sizeof(bf16));
    return some;
  }

  static bool all_finite(const bf16* const* values, int first, int last, int64_t head_size) {
    vu broken{};  // the highest bit of a half marks it
    for (int key = first; key < last; key++)
      for (int64_t d = 0; d < head_size; d += 32)
        broken |= (row(values[key] + d, head_size - d) & 0x7f807f80u) + 0x00800080u;
    uint32_t any = 0;
    for (int i = 0; i < W; i++) any |= broken[i];
    return (any & 0x80008000u) == 0;
  }

  // Copies blocks of N keys that overlap positions [first, last). A last dimension of an odd number
  // is stored alone in its block of `stride` positions; its first key is at 0 or, modulo that,
  // after it.
  template <int N>
  static NOINLINE void copy_keys(const bf16* const* keys, const bf16* const* next, int64_t stride,
                                 int first, int last, int64_t head_size, int64_t width, bf16* to) {
    for (int i = first / N * N; i < last; i += N) {
      bf16* column = to + i / 16 * 16 * width + i % 16 * 2;
      const bf16* from = keys[i / N];
      for (int64_t d = 0; d < width; d += 2, column += 32) {
        bf16 pairs[2 * N] = {};
        if (d + 1 < head_size) {
          memcpy(pairs, from + d * stride, sizeof pairs);
          if (next) __builtin_prefetch(next[i / N] + d * stride, 0, kFetchTo);
        } else if (d < head_size) {
          for (int j = 0; j < N; j++) pairs[2 * j] = from[d * stride - i % stride + j];
        }
        memcpy(column, pairs, sizeof pairs);
      }
    }
  }

  // Pairs the values of positions [first, last); pads with zero to multiples of 32.
  // `next`: the following values, to be prefetched meanwhile, or null.
  static NOINLINE void pair_values(const bf16* const* values, const bf16* const* next, int first,
                                   int last, int64_t head_size, int64_t width, bf16* to) {
    alignas(64) static constexpr bf16 zeros[kMaxHeadSize] = {};
    auto seen = [=](int key) { return key >= first && key < last ? values[key] : zeros; };
    for (int key = first / 32 * 32; key < ceil_div(last, 32) * 32; key += 2) {
      const bf16 *a = seen(key), *b = seen(key + 1);
      bf16* pairs = to + key / 32 * 32 * width + key % 32 * 16;
      for (int64_t d = 0; d < width; d += 32, pairs += 1024) {
        const vu x = row(a + d, head_size - d), y = row(b + d, head_size - d);
        const vu even = (x & 0xffffu) | y << 16, odd = x >> 16 | (y & 0xffff0000u);
        memcpy(pairs, &even, sizeof even);
        memcpy(pairs + 512, &odd, sizeof odd);
      }
      for (int64_t d = 0; next && d < head_size; d += 32) {
        __builtin_prefetch(next[key] + d, 0, kFetchTo);
        __builtin_prefetch(next[key + 1] + d, 0, kFetchTo);
      }
    }
  }

  // scores[G * 16][kPositions] = q[G * 16][width] . keys, for the columns that overlap [first,
  // last). Keys of 16 positions each; successive pairs of their dimensions are `stride` pairs
  // apart.
  // `next`: the following keys, to be prefetched meanwhile, or null.
  template <int G>
  static NOINLINE void scores(const bf16* q, const bf16* const* keys, const bf16* const* next,
                              int64_t stride, int first, int last, int64_t width, float* scores) {
    constexpr int V = 4 / G;
    for (int v = first / (16 * V) * V; v * 16 < last; v += V) {
      auto tile = [=](int64_t k, int j) {
        if (next)
          for (int i = 0; i < 16; i++)
            __builtin_prefetch(next[v + j] + (k * 32 + i * 2) * stride, 0, kFetchTo);
        return keys[v + j] + k * 32 * stride;
      };
      tile_product<G, V, false>(q, width, width / 32, tile, 2 * stride, scores + v * 16,
                                kPositions);
    }
  }

  // Rearranges queries [rows][width], of whole groups of 16 rows, as right factors for row_scores:
  // [rows / 16][width / 32][16 pairs of dimensions][16 rows][2].
  static NOINLINE void pair_queries(bf16* queries, int rows, int64_t width) {
    alignas(64) bf16 group[16 * kMaxHeadSize];
    for (int at = 0; at < rows; at += 16, queries += 16 * width) {
      memcpy(group, queries, 16 * width * sizeof(bf16));
      for (int64_t d = 0; d < width; d += 32) {
        vu v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = load_raw<vu>(group + i * width + d);
        transpose(v);
        memcpy(queries + d * 16, v, sizeof v);
      }
    }
  }

  // Copies rows [first, last) of latents: to[kPositions][width], zeros after `size` numbers.
  static void copy_rows(const bf16* const* rows, int first, int last, int64_t size, int64_t width,
                        bf16* to) {
    for (int i = first; i < last; i++) {
      memcpy(to + i * width, rows[i], size * sizeof(bf16));
      memset(to + i * width + size, 0, (width - size) * sizeof(bf16));
    }
  }

  // c[32][G * 16] = 16 rows at `a` and 16 at `b`, times queries; query(k, g): address of step k of
  // the g-th 16 queries.
  template <int G, class F>
  static INLINE void two_row_product(const bf16* a, const bf16* b, int64_t stride, int64_t steps,
                                     F query, float* c) {
    for_each_index<G>([](auto g) {
      constexpr int G0 = decltype(g)::value;
      tile_zero<G0>(), tile_zero<2 + G0>();
    });
    for (int64_t k = 0; k < steps; k++) {
      tile_load<4>(a + k * 32, stride * sizeof(bf16));
      tile_load<5>(b + k * 32, stride * sizeof(bf16));
      for_each_index<G>([&](auto g) {
        constexpr int G0 = decltype(g)::value;
        tile_load<6 + G0>(query(k, G0), kTileBytes);
        tile_dot_bf16<G0, 4, 6 + G0>();
        tile_dot_bf16<2 + G0, 5, 6 + G0>();
      });
    }
    for_each_index<G>([&](auto g) {
      constexpr int G0 = decltype(g)::value;
      tile_store<G0>(c + G0 * 16, G * 64);
      tile_store<2 + G0>(c + 16 * G * 16 + G0 * 16, G * 64);
    });
  }

  // As scores, for queries of pair_queries and for rows of latents, 16 at each address and `stride`
  // apart. `next`: the following rows, whose numbers [from, size) are prefetched meanwhile, or null.
  template <int G>
  static NOINLINE void row_scores(const bf16* q, const bf16* const* rows, const bf16* const* next,
                                  int64_t stride, int64_t from, int64_t size, int first, int last,
                                  int64_t width, float* scores) {
    for (int i = first / 32 * 2; i * 16 < last; i += 2) {
      auto query = [=](int64_t k, int g) { return q + g * 16 * width + k * 512; };
      alignas(64) float c[32][G * 16];
      two_row_product<G>(rows[i], rows[i + 1], stride, width / 32, query, c[0]);
      for (int j = 0; next && j < 32; j++)
        for (int64_t d = from; d < size; d += 32)
          __builtin_prefetch(next[i * 16 + j] + d, 0, kFetchTo);
      for (int v = 0; v < 2; v++)
        for (int g = 0; g < G; g++) {
          vu block[16];
          UNROLL for (int j = 0; j < 16; j++) block[j] = load_raw<vu>(c[v * 16 + j] + g * 16);
          transpose(block);
          UNROLL for (int j = 0; j < 16; j++)
            memcpy(scores + (g * 16 + j) * kPositions + (i + v) * 16, &block[j], sizeof block[j]);
        }
    }
  }

  // acc[G * 16][width] += p[G * 16][kPositions] * values, for positions [first, last) rounded out
  // to multiples of 32; strides of 0 for one row alone.
  template <int G>
  static NOINLINE void add_values(const bf16* p, int64_t p_stride, const bf16* values, int first,
                                  int last, int64_t width, float* acc, int64_t acc_stride) {
    const int64_t from = first / 32, steps = ceil_div(last, 32) - from;
    auto some = [&](auto columns, int64_t d) {
      constexpr int V = decltype(columns)::value;
      auto tile = [=](int64_t k, int j) {
        return values + (from + k) * 32 * width + (d + j * 16) * 32;
      };
      tile_product<G, V, true>(p + from * 32, p_stride, steps, tile, 32, acc + d, acc_stride);
    };
    int64_t d = 0;
    if constexpr (G == 1)
      for (; d + 64 <= width; d += 64) some(Index<4>{}, d);
    for (; d < width; d += 32) some(Index<2>{}, d);
  }

  // Interleaves even and odd dimensions. + 0: no zero is negative.
  static void write(const float* acc, float sum, bf16* out, int64_t head_size) {
    for (int64_t d = 0; d < head_size; d += 32) {
      const vu even = widen_bits(narrow((load(acc + d) + 0.0f) / sum, bf16{}));
      const vu odd = widen_bits(narrow((load(acc + d + 16) + 0.0f) / sum, bf16{}));
      const vu both = even | odd << 16;
      memcpy(out + d, &both, min<int64_t>(32, head_size - d) * sizeof(bf16));
    }
  }
};
#endif

OCTAVO_END
