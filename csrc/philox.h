// Counter-based random numbers: Philox4x32-10.
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC'11, section 3.3.
#pragma once
#include <array>
#include <cstdint>

namespace octavo {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = 0xD2511F53ull * counter[0], p1 = 0xCD9E8D57ull * counter[2];
    counter = {uint32_t(p1 >> 32) ^ counter[1] ^ key[0], uint32_t(p1),
               uint32_t(p0 >> 32) ^ counter[3] ^ key[1], uint32_t(p0)};
    key[0] += 0x9E3779B9u;  // Weyl constants: golden ratio, sqrt(3) - 1
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// out[i] in [0, 1), with all 53 bits of a double: a pure function of seed, position and stream.
inline void philox_uniforms(const uint64_t* seeds, const uint32_t* positions, uint32_t stream, int64_t count,
                            double* out) {
  for (int64_t i = 0; i < count; i++) {
    const auto words = philox4x32({positions[i], stream, 0, 0},
                                  {uint32_t(seeds[i]), uint32_t(seeds[i] >> 32)});
    out[i] = double((uint64_t(words[1]) << 32 | words[0]) >> 11) * 0x1p-53;
  }
}

}  // namespace octavo
