// One variant: compiled once for each instruction set, with OCTAVO_ISA as its name. products.cpp has
// its products with quantized weights. Some variants have only these, and use the other kernels of
// another variant (dispatch.cpp).
#include "block_packing.h"
#include "quant_packing.h"
#include "activation.h"
#include "attention.h"
#include "delta_rule.h"
#include "head_linear.h"
#include "lora.h"
#include "lora_embedding.h"
#include "lora_replace.h"
#include "norm.h"
#include "rotary.h"
#include "routing.h"
#include "sample.h"
#include "state.h"
#include "tile.h"
#include "wkv7.h"

#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)

namespace octavo {
namespace OCTAVO_ISA {

void linear_q(const LinearQArgs& a);
extern const KernelTable table;
const KernelTable table = {OCTAVO_NAME(OCTAVO_ISA), kPanel, linear_scratch,
#define KERNEL(name, Args) name,
                           OCTAVO_KERNELS(KERNEL)
#undef KERNEL
};

#if defined(__AMX_TILE__)
// Tests one product of each kind, of whole numbers, so that the order of sums makes no difference.
bool tiles_work() {
  constexpr int K = 64;
  alignas(64) int8_t a[16][K];  // rows of x
  alignas(64) uint8_t b[K / 4][16][4];
  alignas(64) bf16 a_half[16][32], b_half[16][16][2];
  alignas(64) int32_t whole[16][16];
  alignas(64) float sums[16][16];
  const auto half = [](float v) { return bf16{uint16_t(load_raw<uint32_t>(&v) >> 16)}; };
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < K; k++) {
      a[i][k] = int8_t((i * 7 + k * 3) % 23 - 11);
      b[k / 4][i][k % 4] = uint8_t((i * 5 + k * 11) % 200);
      if (k < 32) a_half[i][k] = half(a[i][k]), b_half[k / 2][i][k % 2] = half(b[k / 4][i][k % 4]);
    }
  configure_tiles();
  tile_load<1>(a, kTileBytes), tile_load<2>(b, kTileBytes);
  tile_load<3>(a_half, kTileBytes), tile_load<4>(b_half, kTileBytes);
  tile_zero<0>(), tile_zero<5>();
  tile_dot_i8u8<0, 1, 2>(), tile_dot_bf16<5, 3, 4>();
  tile_store<0>(whole, kTileBytes), tile_store<5>(sums, kTileBytes);
  release_tiles();
  bool same = true;
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int k = 0; k < K; k++) {
        if (k == 32) same = same && sums[i][j] == float(sum);
        sum += a[i][k] * b[k / 4][j][k % 4];
      }
      same = same && whole[i][j] == sum;
    }
  return same;
}
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
