// The eight tile registers of AMX: 16 rows of 64 bytes each. A tile's number is a template
// argument, since it is encoded in the instructions.
//
// OCTAVO_EMULATED_TILES emulates them in plain C++, exact to the bit, so that blocking and packing
// can be tested on machines without AMX. The behavior of TDPBF16PS was found by comparing 3 million
// results: for 32 steps of K, one chain of fused multiply-adds over the even steps and one over the
// odd ones, each from zero, then sum + (even + odd). Subnormal inputs and results are zero.
#pragma once
#include "simd.h"

OCTAVO_BEGIN

constexpr int kTileRows16 = 16;  // rows of a tile
constexpr int kTileBytes = 64;  // of a row: 16 sums, 32 bfloat16 or 64 bytes along K

#if defined(OCTAVO_EMULATED_TILES)

struct Tile {
  alignas(64) uint8_t bytes[kTileRows16][kTileBytes];
};
inline thread_local Tile emulated_tiles[8];

inline thread_local int emulated_depth;

// Call configure_tiles before a thread's first tile operation in a parallel region, and release_tiles
// after its last one. `depth`: bytes along K of the tiles that are multiplied. Rows of tiles 4 and 5
// have `depth` bytes; tiles 6 and 7 have depth / 4 rows.
inline void configure_tiles(int depth = kTileBytes) { emulated_depth = depth; }
inline void release_tiles() {}

template <int D>
inline void tile_zero() {
  memset(emulated_tiles[D].bytes, 0, sizeof(Tile));
}
// `stride`: bytes between rows
template <int D>
inline void tile_load(const void* from, int64_t stride) {
  const int rows = D >= 6 ? emulated_depth / 4 : kTileRows16;
  const int nbytes = D == 4 || D == 5 ? emulated_depth : kTileBytes;
  for (int r = 0; r < rows; r++)
    memcpy(emulated_tiles[D].bytes[r], static_cast<const char*>(from) + r * stride, nbytes);
}
template <int S>
inline void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < kTileRows16; r++)
    memcpy(static_cast<char*>(to) + r * stride, emulated_tiles[S].bytes[r], kTileBytes);
}

inline float flush(float f) { return __builtin_fabsf(f) < 0x1p-126f ? __builtin_copysignf(0, f) : f; }
inline float tile_bf16(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  const uint32_t bits = uint32_t(half) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return flush(f);
}

// C[16][16] += A[16][32] * B[16][16][2]: float32 sums of bfloat16 products
template <int C, int A, int B>
inline void tile_dot_bf16() {
  const Tile &a = emulated_tiles[A], &b = emulated_tiles[B];
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < 16; k++) {
        even = flush(__builtin_fmaf(tile_bf16(a.bytes[m] + 4 * k), tile_bf16(b.bytes[k] + 4 * n), even));
        odd = flush(
            __builtin_fmaf(tile_bf16(a.bytes[m] + 4 * k + 2), tile_bf16(b.bytes[k] + 4 * n + 2), odd));
      }
      memcpy(&sum, emulated_tiles[C].bytes[m] + 4 * n, sizeof sum);
      sum = flush(flush(sum) + flush(even + odd));
      memcpy(emulated_tiles[C].bytes[m] + 4 * n, &sum, sizeof sum);
    }
}

// C[16][16] += A[16][depth] * B[depth / 4][16][4]: int32 sums of signed times unsigned (or signed)
// bytes
template <int C, int A, int B, class Byte>
inline void tile_dot_bytes() {
  const Tile &a = emulated_tiles[A], &b = emulated_tiles[B];
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      uint32_t sum;  // unsigned, since intermediate sums may wrap around
      memcpy(&sum, emulated_tiles[C].bytes[m] + 4 * n, sizeof sum);
      for (int k = 0; k < emulated_depth; k++)
        sum += uint32_t(int8_t(a.bytes[m][k]) * Byte(b.bytes[k / 4][4 * n + k % 4]));
      memcpy(emulated_tiles[C].bytes[m] + 4 * n, &sum, sizeof sum);
    }
}
template <int C, int A, int B>
inline void tile_dot_i8u8() {
  tile_dot_bytes<C, A, B, uint8_t>();
}
template <int C, int A, int B>
inline void tile_dot_i8i8() {
  tile_dot_bytes<C, A, B, int8_t>();
}

#elif defined(__AMX_TILE__)

// As above; tiles in use add 8 KB to the saved state of a sleeping thread.
inline void configure_tiles(int depth = kTileBytes) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = uint16_t(i == 4 || i == 5 ? depth : kTileBytes);
    config.rows[i] = uint8_t(i >= 6 ? depth / 4 : kTileRows16);
  }
  // GCC 12's _tile_loadconfig declares a read of 8 bytes: the rest could be optimized away
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }

// Inline assembly, because GCC's intrinsics are macros that paste their argument's text into the
// register's name. "memory": vector stores complete before tiles read them, and vice versa.
template <int D>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(D));
}
template <int D>
INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(D) : "memory");
}
template <int S>
INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(S) : "memory");
}
template <int C, int A, int B>
INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void tile_dot_i8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void tile_dot_i8i8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

OCTAVO_END
