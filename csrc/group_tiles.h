// Products on tiles (tile.h) of quantized weights with a scale for each group of inputs (quant.h,
// blocks.h), for more rows than kGroupRows.
//
// A few steps of K of a panel are unpacked to signed bytes, which stay in L1 for all rows. A group's
// sums are integers. They go through memory to vectors, which scale and add them in the same order
// as the product without tiles, so the bits are the same.
#pragma once
#include "bytes.h"
#include "gemm_tiles.h"

OCTAVO_BEGIN

static_assert(kCodeOffset == 0);

constexpr int64_t kGroupRows = 12;  // vectors are as fast for fewer rows
constexpr int64_t kGroupInputs = kDepth * kTileBytes;  // of a panel, unpacked at once
constexpr int64_t kMostUnpacked = kGroupInputs / 16;  // groups among them

// Additional term of the group of an output, besides bytes and a scale
enum class GroupTerm {
  none,
  minimum,  // number that is multiplied by the sum of x
  offset,  // number that is added to each byte; products with sums of x are exact in float32
  low  // second, unsigned bytes: a code is 256 * the first + the second
};

// Bytes along K of the tiles for a group
constexpr int tile_depth(int64_t group) { return group < kTileBytes ? int(group) : kTileBytes; }

// Inputs of a panel
struct GroupWeights {
  alignas(64) uint8_t bytes[kPanel / 16][kGroupInputs / kQuad][kTileBytes];
  alignas(64) uint8_t low[kPanel / 16][kGroupInputs / kQuad][kTileBytes];
  alignas(64) float scales[kMostUnpacked][kPanel];
  alignas(64) float terms[kMostUnpacked][kPanel];
};

// Quantized rows of x
struct GroupRows {
  const int8_t* q;  // [rows / 16][steps * 64 / depth of a tile][16][depth]
  float* scales;  // [rows / 16][groups][16]
  float* terms;  // likewise: factors of minima or offsets
  int64_t steps, groups;

  // Sets the numbers after row m, which may be subnormal, and slow.
  void clear_padding(int64_t m) const {
    for (; m % kTileRows16; m++)
      for (int64_t g = 0; g < groups; g++)
        scales[in_sixteens(m, g, groups)] = terms[in_sixteens(m, g, groups)] = 0;
  }
};

// Sums of successive groups: all groups of 16 rows and 16 outputs, then the next outputs, then the
// next rows.
template <int Group, bool Low>
struct GroupSums {
  alignas(64) int32_t high[kTileRows16][16];
  alignas(64) int32_t low[Low ? kTileRows16 : 0][16];
};
template <int Group, bool Low>
struct GroupProducts {
  static constexpr int kDeep = tile_depth(Group);
  const int8_t* a;
  const uint8_t* b;
  int64_t left, groups, sixteens, next_rows;
  int column;

  INLINE void multiply() {
    tile_zero<0>();
    if constexpr (Low) tile_zero<1>();
    UNROLL for (int i = 0; i < Group; i += kDeep) {
      tile_load<4>(a, kDeep);
      tile_load<6>(b, kTileBytes);
      tile_dot_i8i8<0, 4, 6>();
      if constexpr (Low) {
        tile_load<7>(b + sizeof(GroupWeights::bytes), kTileBytes);
        tile_dot_i8u8<1, 4, 7>();
      }
      a += kTileRows16 * kDeep;
      b += kDeep / kQuad * kTileBytes;
    }
    if (__builtin_expect(--left > 0, true)) return;  // registers are for the loop
    left = groups;
    a -= groups * kTileRows16 * Group;
    b += sizeof(GroupWeights::bytes[0]) - groups * (Group / kQuad * kTileBytes);
    if (++column < kPanel / 16) return;
    column = 0;
    b -= sizeof(GroupWeights::bytes);
    if (--sixteens > 0) a += next_rows;  // two more products than needed are made at the end
  }
  INLINE void store(GroupSums<Group, Low>& to) const {
    tile_store<0>(to.high, kTileBytes);
    if constexpr (Low) tile_store<1>(to.low, kTileBytes);
  }
};

// c[sixteens * 16][kPanel] (+)= x * w for `groups` groups of `Group` inputs. x, its scales and terms
// are those of the first group; rows of 16 are `next_rows` bytes and `next_scales` numbers apart.
// Meanwhile packed weights are prefetched, from `ahead` to `end`.
//
// Vectors work on a group's sums while the tiles multiply the next but one. While tiles are in use,
// one port of the processor executes floats of 512 bits instead of two: the 3 or 4 instructions for
// 16 sums limit the speed.
template <int Group, GroupTerm Term>
NOINLINE void group_block(const int8_t* x, int64_t next_rows, const float* x_scales,
                          const float* x_terms, int64_t next_scales, const GroupWeights& w,
                          int64_t sixteens, int64_t groups, float* c, bool begin,
                          const uint8_t* ahead, const uint8_t* end) {
  constexpr bool low = Term == GroupTerm::low;
  GroupSums<Group, low> sums[2], *ready = sums, *later = sums + 1;
  GroupProducts<Group, low> products{x, w.bytes[0][0], groups, groups, sixteens, next_rows, 0};
  products.multiply();
  products.store(*ready);
  products.multiply();
  const int64_t fetched = ceil_div(end - ahead, sixteens * (kPanel / 16));  // for a tile of c
  for (int64_t s = 0; s < sixteens; s++, c += kTileRows16 * kPanel, x_scales += next_scales, x_terms += next_scales)
    for (int j = 0; j < kPanel; j += 16) {
      for (const uint8_t* to = min(ahead + fetched, end); ahead < to; ahead += 64)
        __builtin_prefetch(ahead, 0, 2);
      vf acc[kTileRows16];
      UNROLL for (int i = 0; i < kTileRows16; i++) acc[i] = begin ? vf{} : load(c + i * kPanel + j);
      const float *scales = w.scales[0] + j, *factors = x_scales, *more = x_terms;
      for (const float* last = scales + groups * kPanel; scales != last; scales += kPanel) {
        products.store(*later);
        products.multiply();
        const vf scale = load(scales);
        [[maybe_unused]] const vf term = load(scales + kMostUnpacked * kPanel);
        UNROLL for (int i = 0; i < kTileRows16; i++) {
          vi sum = load_raw<vi>(ready->high[i]);
          if constexpr (low) sum = (vi)((vu)sum << 8) + load_raw<vi>(ready->low[i]);
          vf v = to_float(sum);
          if constexpr (Term == GroupTerm::offset) v = fma(more[i], term, v);
          acc[i] = fma(v * splat(factors[i]), scale, acc[i]);
          if constexpr (Term == GroupTerm::minimum) acc[i] = fma(more[i], term, acc[i]);
        }
        factors += kTileRows16;
        if constexpr (Term == GroupTerm::offset || Term == GroupTerm::minimum) more += kTileRows16;
        auto* other = ready;
        ready = later, later = other;
      }
      UNROLL for (int i = 0; i < kTileRows16; i++) store(c + i * kPanel + j, acc[i]);
    }
}

// Products with weights of one format
struct GroupKernel {
  int64_t group;
  // Address of a group of a panel
  const uint8_t* (*at)(const LinearQArgs& a, int64_t panel, int64_t group);
  // Writes groups first ... first + count of a panel to w.
  void (*unpack)(const LinearQArgs& a, int64_t panel, int64_t first, int64_t count, GroupWeights& w);
  decltype(&group_block<32, GroupTerm::none>) multiply;
};

// Multiplies m rows, from row row0 of out on. `finish(first, rows, col, c)` may add to the sums
// c [rows][kPanel] of rows first ... of this product and the panel at column col.
template <class T, class Finish>
INLINE void group_tiles(const LinearQArgs& a, T t, const GroupRows& x, int64_t row0, int64_t m,
                        const GroupKernel& kernel, Finish finish) {
  TileCut cut = cut_tiles(a, m, x.steps);
  cut.own = false;  // x is tiles already
  cut.depth = kDepth;
  cut.deep = tile_depth(kernel.group);
  const int64_t rows_nbytes = x.steps * kTileNbytes;  // of 16 rows
  const char* q = reinterpret_cast<const char*>(x.q);
  for_tile_parts(
      a, m, x.steps, cut, [&](int64_t part) { return q + part * cut.part * rows_nbytes; },
      [&](const char* at, int64_t sixteens, int64_t panel, int64_t from, int64_t depth, char* c,
          int64_t next_panel, int64_t next_from) {
        const int64_t first = from * kTileBytes / kernel.group;
        const int64_t count = min(depth * kTileBytes / kernel.group, x.groups - first);
        const int64_t nbytes = kernel.at(a, panel, first + count) - kernel.at(a, panel, first);
        const uint8_t* next = kernel.at(a, next_panel, next_from * kTileBytes / kernel.group);
        GroupWeights w;
        kernel.unpack(a, panel, first, count, w);
        const int64_t scale = ((at - q) / rows_nbytes * x.groups + first) * kTileRows16;
        kernel.multiply(reinterpret_cast<const int8_t*>(at), rows_nbytes, x.scales + scale,
                        x.terms + scale, x.groups * kTileRows16, w, sixteens, count,
                        reinterpret_cast<float*>(c), from == 0, next, next + nbytes);
      },
      [&](int64_t first, int64_t rows, int64_t col, char* c, char* up) {
        float *sums = reinterpret_cast<float*>(c), *others = reinterpret_cast<float*>(up);
        finish(first, rows, col, sums);
        if (up) finish(first, rows, a.n / 2 + col, others);
        write_part(a, t, a.m, row0 + first, rows, col, sums, others);
      });
}

OCTAVO_END
