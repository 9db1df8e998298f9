// Products on tiles (tile.h): of bfloat16 for every number of rows, of bytes (quant.h) for more
// than a few.
//
// A weight is read in its packed layout: a step of K of a panel, 32 bfloat16 or 64 bytes of its
// kPanel outputs, is four adjacent tiles. Rows of x are copied into tiles: [groups of 16
// rows][steps][16][64 bytes]. Except for the product itself the two types are alike, so sizes and
// addresses are in bytes here.
//
// A tile always has 16 rows. Rows beyond x contain arbitrary numbers, and their sums are ignored.
// So a row's sum uses the same instructions on the same numbers, alone or not. Blocks of K store
// and reload sums, which changes no bit.
#pragma once
#include "gemm.h"
#include "tile.h"

OCTAVO_BEGIN

constexpr int64_t kTileNbytes = kTileRows16 * kTileBytes;
constexpr int64_t kPanelRow = kPanel * 4;  // bytes between the rows of a tile in a panel, and of sums
constexpr int64_t kStepNbytes = kTileRows16 * kPanelRow;  // of a step of K of a panel; of sums of a group

// Sizes of the parts of a product, as measured on Emerald Rapids (48 KB of L1, 2 MB of L2 for a
// core).
constexpr int64_t kPartNbytes = 1200000;  // of a part of x, for all of K, which stays in L2
constexpr int64_t kMostGroups = 64, kLeastGroups = 8;  // groups of 16 rows in such a part
constexpr int64_t kDepth = 4;  // steps in a block of K: 16 KB of a panel, which stay in L1
// If K is so long (in bytes) that a part would have few rows, and there are many: a block of K of a
// larger part stays in L2, with the sums of some panels.
constexpr int64_t kLongK = 4800, kLongFrom = 128, kLongGroups = 16, kLongDepth = 8, kLongPanels = 8;
constexpr int64_t kOwnFrom = 64;  // more rows than these may be cut into parts of single threads
constexpr int64_t kPastCaches = 256;  // minimum number of rows for writing out past the caches
constexpr int64_t kTasks = 4;  // for each thread, if panels alone are too few
constexpr int64_t kTogether = 2048;  // maximum rows cut together, which bounds memory
constexpr int64_t kFetchAhead = 4096;  // bytes, for weights that are read once
constexpr int64_t kSumsNbytes = 2 * kMostGroups * kStepNbytes;  // of a part, at most: gate and up
static_assert(kLongPanels * kLongGroups <= 2 * kMostGroups);

struct DotBf16 {
  template <int C, int A, int B>
  static INLINE void dot() {
    tile_dot_bf16<C, A, B>();
  }
};
struct DotBytes {
  template <int C, int A, int B>
  static INLINE void dot() {
    tile_dot_i8u8<C, A, B>();
  }
};

template <class F>
INLINE void fetch(const char*& ahead) {
#pragma GCC unroll 64
  for (int i = 0; i < F::lines; i++) __builtin_prefetch(ahead + i * 64, 0, F::locality);
  ahead += F::lines * 64;
}

// Sums c of two groups of rows and half a panel, two tiles wide; F is prefetched in each step.
template <class Dot, class F>
void two_by_two(const char* a, int64_t next_group, const char* b, int64_t steps, char* c, bool begin,
                const char*& ahead) {
  char* d = c + kStepNbytes;
  if (begin) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(c, kPanelRow), tile_load<1>(c + kTileBytes, kPanelRow);
    tile_load<2>(d, kPanelRow), tile_load<3>(d + kTileBytes, kPanelRow);
  }
  for (int64_t i = 0; i < steps; i++, a += kTileNbytes, b += kStepNbytes) {
    tile_load<6>(b, kPanelRow);
    tile_load<4>(a, kTileBytes);
    Dot::template dot<0, 4, 6>();
    tile_load<7>(b + kTileBytes, kPanelRow);
    Dot::template dot<1, 4, 7>();
    tile_load<5>(a + next_group, kTileBytes);
    Dot::template dot<2, 5, 6>();
    Dot::template dot<3, 5, 7>();
    fetch<F>(ahead);
  }
  tile_store<0>(c, kPanelRow), tile_store<1>(c + kTileBytes, kPanelRow);
  tile_store<2>(d, kPanelRow), tile_store<3>(d + kTileBytes, kPanelRow);
}

// Sums of one group and a whole panel.
template <class Dot, class F>
void one_by_four(const char* a, const char* b, int64_t steps, char* c, bool begin, const char*& ahead) {
  if (begin) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(c, kPanelRow), tile_load<1>(c + kTileBytes, kPanelRow);
    tile_load<2>(c + 2 * kTileBytes, kPanelRow), tile_load<3>(c + 3 * kTileBytes, kPanelRow);
  }
  for (int64_t i = 0; i < steps; i++, a += kTileNbytes, b += kStepNbytes) {
    tile_load<4>(a, kTileBytes);
    tile_load<5>(b, kPanelRow);
    Dot::template dot<0, 4, 5>();
    tile_load<6>(b + kTileBytes, kPanelRow);
    Dot::template dot<1, 4, 6>();
    tile_load<7>(b + 2 * kTileBytes, kPanelRow);
    Dot::template dot<2, 4, 7>();
    tile_load<5>(b + 3 * kTileBytes, kPanelRow);
    Dot::template dot<3, 4, 5>();
    fetch<F>(ahead);
  }
  tile_store<0>(c, kPanelRow), tile_store<1>(c + kTileBytes, kPanelRow);
  tile_store<2>(c + 2 * kTileBytes, kPanelRow), tile_store<3>(c + 3 * kTileBytes, kPanelRow);
}

// c[groups * 16][kPanel] (+)= x * w for a block of K. Meanwhile the next one, at `ahead`, is
// prefetched into L2, spread over some passes, so that neither computing nor reading waits for the
// other. `Lines`: number of lines prefetched for each step.
template <class Dot, int Lines>
INLINE void tile_block(const char* x, int64_t next_group, const char* w, int64_t steps, int64_t groups,
                       char* c, bool begin, const char* ahead) {
  constexpr int locality = 2;
  if (groups == 1) {  // weights that are read once are prefetched in passing
    ahead = w + kFetchAhead;
    return one_by_four<Dot, Fetch<Lines, locality>>(x, w, steps, c, begin, ahead);
  }
  const int64_t pairs = groups / 2;
  for (int64_t g = 0; g < pairs; g++)
    for (int half = 0; half < 2; half++) {
      const int64_t at = half * 2 * kTileBytes;
      auto pass = [&](auto fetched) {
        two_by_two<Dot, decltype(fetched)>(x + 2 * g * next_group, next_group, w + at, steps,
                                           c + 2 * g * kStepNbytes + at, begin, ahead);
      };
      if (pairs == 1)
        pass(Fetch<Lines / 2, locality>{});
      else if (pairs < 4 && g < 2)
        pass(Fetch<Lines / 4, locality>{});
      else if (pairs >= 4 && pairs < 8 && g < 4)
        pass(Fetch<Lines / 8, locality>{});
      else if (pairs >= 8 && g < 8)
        pass(Fetch<Lines / 16, locality>{});
      else
        pass(Fetch<0, locality>{});
    }
  if (groups % 2)
    one_by_four<Dot, Fetch<0, locality>>(x + 2 * pairs * next_group, w, steps,
                                         c + 2 * pairs * kStepNbytes, begin, ahead);
}

// Place of byte k of a row of x in tiles with `depth` bytes along K
INLINE int64_t in_tiles(int64_t row, int64_t k, int64_t steps, int depth) {
  return row / kTileRows16 * steps * kTileNbytes + k / depth * depth * kTileRows16 +
         row % kTileRows16 * depth + k % depth;
}

struct TileCut {
  int64_t groups, part, parts;  // groups of 16 rows, number of groups in a part, and of parts
  int64_t depth;  // steps in a block of K
  int64_t set, sets;  // panels of out that a part is multiplied by together; number of such sets
  bool own;  // a thread processes whole parts, and makes their tiles only for itself
  int deep = kTileBytes;  // bytes along K of a tile
};

template <class Args>
INLINE TileCut cut_tiles(const Args& a, int64_t m, int64_t steps) {
  const bool gated = a.gated != Gated::none;
  const int64_t row = steps * kTileBytes, panels = panels_of(a);
  const bool many_long = row > kLongK && m > kLongFrom;
  const int64_t group_nbytes = kTileRows16 * row;
  const int64_t fits =
      many_long ? kLongGroups : min(kMostGroups, max(kLeastGroups, kPartNbytes / group_nbytes));
  TileCut cut;
  cut.groups = ceil_div(m, kTileRows16);
  cut.set = many_long ? kLongPanels / (gated ? 2 : 1) : 1;
  cut.sets = ceil_div(panels, cut.set);
  const int64_t wanted = ceil_div(kTasks * num_threads(), cut.sets);
  int64_t parts = min(cut.groups, max(wanted, ceil_div(cut.groups, fits)));
  cut.own = !many_long && m > kOwnFrom && parts >= 2 * num_threads() &&
            fits * group_nbytes <= kPartNbytes;
  if (cut.own) parts = ceil_div(parts, num_threads()) * num_threads();
  cut.part = ceil_div(cut.groups, parts);
  if (cut.part < cut.groups && cut.part < fits) cut.part += cut.part % 2;  // groups are processed in pairs
  cut.parts = ceil_div(cut.groups, cut.part);
  const int64_t depth = m <= kTileRows16 ? steps : many_long ? kLongDepth : kDepth;
  cut.depth = ceil_div(steps, ceil_div(steps, depth));
  return cut;
}

INLINE void store_past_caches(char* to, const char* from) {  // 64 bytes
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), load_raw<__m512i>(from));
#else
  memcpy(to, from, 64);
#endif
}

// Calls write_panel for rows first ... of m; many rows bypass the caches if whole lines are
// written.
template <class T, class Args>
INLINE void write_part(const Args& a, T t, int64_t m, int64_t row0, int64_t rows, int64_t col,
                       const float* c, const float* up) {
  const int64_t item = size_of(a.out_dtype), stride = a.out_stride * item;
  char* out = static_cast<char*>(a.out) + row0 * stride + col * item;
  const bool lines = a.n - col >= kPanel && (reinterpret_cast<uintptr_t>(out) | stride) % 64 == 0;
  if (m < kPastCaches || !lines) return write_panel(a, t, c, up, col, out, a.out_stride, rows);
  for (int64_t i = 0; i < rows; i += kTileRows16) {
    alignas(64) char block[kTileRows16 * kPanel * sizeof(float)];
    const int64_t some = min<int64_t>(kTileRows16, rows - i);
    write_panel(a, t, c + i * kPanel, up ? up + i * kPanel : nullptr, col, block, kPanel, some);
    for (int64_t r = 0; r < some; r++)
      for (int64_t at = 0; at < kPanel * item; at += 64)
        store_past_caches(out + (i + r) * stride + at, block + r * kPanel * item + at);
  }
}

// Multiplies m rows by all panels: `tiles(part)` returns the tiles of the first group of a part;
// `multiply(x, groups, panel, from, depth, c, next_panel, next_from)` adds the product of groups of
// tiles and `depth` steps of a panel, step `from` first, to the sums c, which step 0 begins; the
// next panel and step are known for prefetching. `finish(first, rows, col, c, up)` uses the sums of
// rows first ... and the panel at column col, and those of its other half if gated.
template <class Args, class Tiles, class Multiply, class Finish>
INLINE void for_tile_parts(const Args& a, int64_t m, int64_t steps, const TileCut& cut, Tiles tiles,
                           Multiply multiply, Finish finish) {
  const bool gated = a.gated != Gated::none;
  const int64_t half = a.n / 2 / kPanel, last_panel = a.first_panel + panels_of(a);
  auto task = [&](const char* x, int64_t p, int64_t s) {
    const int64_t first = p * cut.part, groups = min(cut.part, cut.groups - first);
    const int64_t panel0 = a.first_panel + s * cut.set, end = min(panel0 + cut.set, last_panel);
    int64_t together[kLongPanels];
    int count = 0;
    for (int64_t i = panel0; i < end; i++) {
      together[count++] = i;
      if (gated) together[count++] = half + i;
    }
    const int64_t sums_nbytes = groups * kStepNbytes;
    char* c = static_cast<char*>(scratch(count * sums_nbytes, 1));
    for (int64_t from = 0; from < steps; from += cut.depth) {
      const int64_t depth = min(cut.depth, steps - from);
      for (int i = 0; i < count; i++) {
        const bool last = i + 1 == count;
        multiply(x + from * kTileNbytes, groups, together[i], from, depth, c + i * sums_nbytes,
                 together[last ? 0 : i + 1], last ? from + depth : from);
      }
    }
    const int64_t rows = min(groups * kTileRows16, m - first * kTileRows16);
    for (int64_t i = panel0; i < end; i++, c += (gated ? 2 : 1) * sums_nbytes)
      finish(first * kTileRows16, rows, i * kPanel, c, gated ? c + sums_nbytes : nullptr);
  };
  const int64_t run = cut.own ? cut.sets : 1;  // tasks in a row
  // Tiles compute 16 rows at once.
  const int64_t cost = ceil_div(a.n, kPanel) * kVectors * cut.groups * steps * 2 * kTileRows16;
  parallel_ranges(cut.parts * cut.sets / run, cost, [&](int64_t begin, int64_t end) {
    configure_tiles(cut.deep);
    for (int64_t i = begin * run; i < end * run; i += run) {
      const int64_t part = i / cut.sets;
      const char* x = tiles(part);
      for (int64_t j = i; j < i + run; j++) task(x, part, j % cut.sets);
    }
    release_tiles();
#if defined(__AVX512F__)
    _mm_sfence();  // writes past the caches complete before other threads are notified
#endif
  });
}

// Multiplies by weights whose packed panels are tiles; arguments as above.
template <class Dot, class Args, class Tiles, class Finish>
INLINE void tile_products(const Args& a, int64_t m, int64_t steps, const TileCut& cut, Tiles tiles,
                          Finish finish) {
  const char* weight = static_cast<const char*>(a.weight);
  auto at = [&](int64_t panel, int64_t from) { return weight + (panel * steps + from) * kStepNbytes; };
  for_tile_parts(
      a, m, steps, cut, tiles,
      [&](const char* x, int64_t groups, int64_t panel, int64_t from, int64_t depth, char* c,
          int64_t next_panel, int64_t next_from) {
        tile_block<Dot, kStepNbytes / 64>(x, steps * kTileNbytes, at(panel, from), depth, groups, c,
                                          from == 0, at(next_panel, next_from));
      },
      finish);
}

// Makes tiles of a group's rows. Zeros follow K as in the weights: zero times NaN would be NaN.
INLINE void make_tiles(const bf16* x, int64_t stride, int64_t rows, int64_t k, char* to) {
  constexpr int64_t step = kTileBytes / sizeof(bf16);
  for (int64_t r = 0; r < rows; r++, x += stride, to += kTileBytes) {
    char* at = to;
    int64_t p = 0;
    for (; p + step <= k; p += step, at += kTileNbytes) memcpy(at, x + p, kTileBytes);
    if (p == k) continue;
    memset(at, 0, kTileBytes);
    memcpy(at, x + p, (k - p) * sizeof(bf16));
  }
}

// Bytes of shared tiles, of tiles of single threads, at most as many in all (cut_tiles assigns each
// thread two parts or more), and of sums. Quantized rows (quant.h) need less than shared tiles.
int64_t linear_scratch(int64_t rows, int64_t k, int64_t threads) {
  const int64_t row = padded_k<bf16>(k) * sizeof(bf16);
  const int64_t groups = ceil_div(min(rows, kTogether), kTileRows16), tiles = groups * kTileRows16 * row;
  const int64_t panels = row > kLongK ? kLongPanels : 2;  // of the weight, that a part meets together
  return tiles + min(tiles, threads * kPartNbytes) +
         threads * min(kSumsNbytes, groups * kStepNbytes * panels);
}

// Copies rows of bfloat16 into tiles, some at a time, and calls f(row0, m, cut, tiles): see
// for_tile_parts.
template <class Args, class F>
INLINE void with_tiles(const Args& a, F f) {
  const int64_t steps = padded_k<bf16>(a.k) * sizeof(bf16) / kTileBytes;
  const int64_t group_nbytes = steps * kTileNbytes;
  for (int64_t row0 = 0; row0 < a.m; row0 += kTogether) {
    const int64_t m = min(kTogether, a.m - row0);
    const bf16* x = static_cast<const bf16*>(a.x) + row0 * a.x_stride;
    const TileCut cut = cut_tiles(a, m, steps);
    auto make = [&](int64_t g, char* to) {
      const int64_t first = g * kTileRows16;
      make_tiles(x + first * a.x_stride, a.x_stride, min<int64_t>(kTileRows16, m - first), a.k, to);
    };
    char* shared = nullptr;
    if (!cut.own) {
      shared = static_cast<char*>(scratch(cut.groups * group_nbytes));
      parallel_for(cut.groups, m * steps, [&](int64_t g) { make(g, shared + g * group_nbytes); });
    }
    f(row0, m, cut, [&](int64_t part) -> const char* {
      const int64_t first = part * cut.part;
      if (shared) return shared + first * group_nbytes;
      const int64_t groups = min(cut.part, cut.groups - first);
      char* own = static_cast<char*>(scratch(groups * group_nbytes, 2));
      for (int64_t g = 0; g < groups; g++) make(first + g, own + g * group_nbytes);
      return own;
    });
  }
}

void linear_tiles(const LinearArgs& a) {
  const int64_t steps = padded_k<bf16>(a.k) * sizeof(bf16) / kTileBytes;
  with_tiles(a, [&](int64_t row0, int64_t m, const TileCut& cut, auto tiles) {
    tile_products<DotBf16>(a, m, steps, cut, tiles,
                           [&](int64_t first, int64_t rows, int64_t col, char* c, char* up) {
                             write_part(a, bf16{}, a.m, row0 + first, rows, col,
                                        reinterpret_cast<float*>(c), reinterpret_cast<float*>(up));
                           });
  });
}

OCTAVO_END
