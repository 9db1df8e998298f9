// Packing of block types (blocks.h) from the blocks of a file, and rows of packed tables.
#pragma once
#include "blocks.h"

OCTAVO_BEGIN

// A block of one output: codes, and the bytes of the group's scales and minima as they are packed.
struct Block {
  uint8_t codes[kUnit * kSuperUnits];
  uint8_t scales[16][2], minima[16][2];
  uint8_t factors[2][2];
};

INLINE void read_nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
}

// Reads a block of a file.
template <QuantFormat F>
INLINE const uint8_t* read_block(const uint8_t* p, Block& b) {
  auto copy2 = [](uint8_t* to, const uint8_t* from) { memcpy(to, from, 2); };
  if constexpr (F == QuantFormat::q4_0 || F == QuantFormat::iq4_nl) {
    copy2(b.scales[0], p);
    read_nibbles(p + 2, b.codes);
    return p + 18;
  } else if constexpr (F == QuantFormat::q4_1) {
    copy2(b.scales[0], p), copy2(b.minima[0], p + 2);
    read_nibbles(p + 4, b.codes);
    return p + 20;
  } else if constexpr (F == QuantFormat::q5_0 || F == QuantFormat::q5_1) {
    copy2(b.scales[0], p);
    p += 2;
    if constexpr (F == QuantFormat::q5_1) copy2(b.minima[0], p), p += 2;
    const uint32_t high = load_raw<uint32_t>(p);
    read_nibbles(p + 4, b.codes);
    for (int i = 0; i < kUnit; i++) b.codes[i] |= (high >> i & 1) << 4;
    return p + 20;
  } else if constexpr (F == QuantFormat::q8_0) {
    copy2(b.scales[0], p);
    for (int i = 0; i < kUnit; i++) b.codes[i] = p[2 + i] ^ 128;
    return p + 34;
  } else if constexpr (F == QuantFormat::mxfp4) {
    b.scales[0][0] = *p;
    read_nibbles(p + 1, b.codes);
    return p + 17;
  } else if constexpr (F == QuantFormat::nvfp4) {
    memcpy(b.factors, p, sizeof(float));
    b.scales[0][0] = p[4], b.scales[1][0] = p[5];
    read_nibbles(p + 6, b.codes);
    return p + 22;
  } else if constexpr (F == QuantFormat::q2_k) {
    for (int i = 0; i < 16; i++) b.scales[i][0] = p[i] & 15, b.minima[i][0] = p[i] >> 4;
    for (int i = 0; i < 256; i++)
      b.codes[i] = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    copy2(b.factors[0], p + 80), copy2(b.factors[1], p + 82);
    return p + 84;
  } else if constexpr (F == QuantFormat::q3_k) {
    const uint8_t *high = p, *low = p + 32, *s = p + 96;
    for (int i = 0; i < 256; i++)
      b.codes[i] = (low[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) |
                   (high[i % 32] >> (i / 32) & 1) << 2;
    for (int i = 0; i < 16; i++) {
      const int four = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
      b.scales[i][0] = uint8_t((four | (s[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
    }
    copy2(b.factors[0], p + 108);
    return p + 110;
  } else if constexpr (F == QuantFormat::q4_k || F == QuantFormat::q5_k) {
    copy2(b.factors[0], p), copy2(b.factors[1], p + 2);
    const uint8_t* s = p + 4;
    for (int i = 0; i < 8; i++) {
      b.scales[i][0] = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
      b.minima[i][0] = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
    }
    const uint8_t *high = p + 16, *low = F == QuantFormat::q5_k ? p + 48 : p + 16;
    for (int i = 0; i < 256; i++) {
      b.codes[i] = low[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
      if constexpr (F == QuantFormat::q5_k) b.codes[i] |= (high[i % 32] >> (i / 32) & 1) << 4;
    }
    return low + 128;
  } else if constexpr (F == QuantFormat::q6_k) {
    const uint8_t *low = p, *high = p + 128;
    for (int i = 0; i < 256; i++) {
      const int half = i / 128, part = i % 128 / 32, l = i % 32;
      b.codes[i] = (low[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4) & 15) |
                   (high[half * 32 + l] >> (part * 2) & 3) << 4;
    }
    for (int i = 0; i < 16; i++) b.scales[i][0] = p[192 + i];
    copy2(b.factors[0], p + 208);
    return p + 210;
  } else if constexpr (F == QuantFormat::iq4_xs) {
    copy2(b.factors[0], p);
    const int high = load_raw<uint16_t>(p + 2);
    for (int i = 0; i < 8; i++) {
      b.scales[i][0] = uint8_t(((p[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32);
      read_nibbles(p + 8 + 16 * i, b.codes + kUnit * i);
    }
    return p + 136;
  } else {
    static_assert(F >= QuantFormat::iq1_levels);
    constexpr int groups = kSuperUnits * Blocks<F>::groups;
    copy2(b.factors[0], p);
    for (int i = 0; i < groups; i++) b.scales[i][0] = p[2 + i];
    p += 2 + groups;
    for (int i = 0; i < kSuperUnits; i++, p += 16) read_nibbles(p, b.codes + kUnit * i);
    return p;
  }
}

// Writes the bits [shift, shift + Bits) of a unit's codes into a plane, for the output at p.
template <int Bits>
INLINE void write_plane(const uint8_t* codes, int shift, uint8_t* p) {
  constexpr int per_vector = 8 / Bits;
  for (int v = 0; v < kUnitQuads / per_vector; v++) {
    uint32_t lane = 0;
    for (int i = 0; i < per_vector; i++) {
      const uint32_t four = load_raw<uint32_t>(codes + (v * per_vector + i) * kQuad);
      lane |= (four >> shift & 0x01010101u * ((1u << Bits) - 1)) << (i * Bits);
    }
    memcpy(p + v * kPanel * kQuad, &lane, sizeof lane);
  }
}

template <QuantFormat F>
void write_block(const Block& b, int64_t first_unit, int lane, uint8_t* panel) {
  using B = Blocks<F>;
  for (int u = 0; u < B::numbers / kUnit; u++) {
    const uint8_t* codes = b.codes + u * kUnit;
    uint8_t *unit = panel + B::unit_at(first_unit + u), *p = unit + lane * kQuad;
    constexpr int64_t plane4 = kPanel * kUnit / 2, plane2 = kPanel * kUnit / 4;
    if constexpr (B::bits == 8) write_plane<8>(codes, 0, p);
    if constexpr (B::bits == 4 || B::bits == 5 || B::bits == 6) write_plane<4>(codes, 0, p);
    if constexpr (B::bits == 2 || B::bits == 3) write_plane<2>(codes, 0, p);
    if constexpr (B::bits == 5) write_plane<1>(codes, 4, p + plane4);
    if constexpr (B::bits == 6) write_plane<2>(codes, 4, p + plane4);
    if constexpr (B::bits == 3) write_plane<1>(codes, 2, p + plane2);
    for (int g = 0; g < B::groups; g++) {
      uint8_t* to = unit + B::codes_nbytes + g * B::group_nbytes;
      memcpy(to + lane * B::scale_nbytes, b.scales[u * B::groups + g], B::scale_nbytes);
      if constexpr (B::min)
        memcpy(to + (kPanel + lane) * B::scale_nbytes, b.minima[u * B::groups + g], B::scale_nbytes);
    }
  }
  if constexpr (B::factor_nbytes > 0) memcpy(panel + lane * sizeof(float), b.factors, sizeof(float));
  if constexpr (B::super)
    for (int i = 0; i < (B::min ? 2 : 1); i++)
      memcpy(panel + B::header_at(first_unit) + (i * kPanel + lane) * 2, b.factors[i], 2);
}

void pack_blocks(const PackBlocksArgs& a) {
  with_block_type(a.format, [&](auto format) {
    constexpr QuantFormat F = decltype(format)::value;
    using B = Blocks<F>;
    for_panels(a.row0, a.rows, a.rows * a.k / kQuad, [&](int64_t first, int64_t rows) {
      const int64_t col = first / kPanel * kPanel;
      uint8_t* panel = static_cast<uint8_t*>(a.dst) + col / kPanel * B::panel_nbytes(a.k);
      // The last row of the weight writes the padding.
      const int64_t end = first + rows, padded = end == a.n ? col + kPanel : end;
      for (int64_t n = first; n < padded; n++) {
        const uint8_t* from = static_cast<const uint8_t*>(a.src) + (n - a.row0) * a.src_stride;
        Block block = {};
        for (int64_t k = 0; k < a.k; k += B::numbers) {
          if (n < end) from = read_block<F>(from, block);
          write_block<F>(block, k / kUnit, int(n - col), panel);
        }
      }
    });
  });
}

// ---- rows of a table ----

// Writes the numbers of a unit of one output.
template <QuantFormat F>
INLINE void read_unit(const uint8_t* panel, int64_t u, int lane, float* out) {
  using B = Blocks<F>;
  PackedUnits<F> from{panel, lane / W * W};
  from.go_to(u);
  const int at = lane % W;
  for (int g = 0; g < B::groups; g++) {
    const float scale = from.scale(g, 0)[at];
    float low = 0;
    if constexpr (B::min) low = from.minimum(g, 0)[at];
    for (int q = 0; q < kUnitQuads / B::groups; q++) {
      const int quad = g * kUnitQuads / B::groups + q;
      const uint32_t four = from.codes(quad, 0)[at];
      for (int i = 0; i < kQuad; i++) {
        const int byte = B::offset ? int8_t(four >> (8 * i)) : int(four >> (8 * i) & 255);
        out[quad * kQuad + i] = fma(splat(scale), splat(float(byte - B::zero)), splat(low))[0];
      }
    }
  }
}

void gather_blocks(const GatherBlocksArgs& a) {
  with_block_type(a.format, [&](auto format) {
    constexpr QuantFormat F = decltype(format)::value;
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      parallel_for(a.rows, a.rows * a.dim * 4, [&](int64_t i) {
        const int64_t id = a.ids[i];
        T* out = static_cast<T*>(a.out) + i * a.dim;
        alignas(64) float unit[kUnit];
        const bool known = id >= 0 && id < a.n;
        const uint8_t* panel = static_cast<const uint8_t*>(a.table) +
                               (known ? id / kPanel * Blocks<F>::panel_nbytes(a.dim) : 0);
        for (int j = 0; j < kUnit; j++) unit[j] = NAN;
        for (int64_t u = 0; u < a.dim / kUnit; u++, out += kUnit) {
          if (known) read_unit<F>(panel, u, int(id % kPanel), unit);
          UNROLL for (int j = 0; j < kUnit; j += W) store(out + j, load(unit + j));
        }
      });
    });
  });
}

OCTAVO_END
