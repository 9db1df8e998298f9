// Types and sizes that the arguments of all kernels share.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// Storage types of the two 16-bit formats: bits only, the arithmetic is in simd.h.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Contents of a KV cache: numbers of the model's type, or bytes (kv_format.h).
enum class CacheType : int { same = 0, e4m3 = 1, e5m2 = 2, int8 = 3 };
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct i8 {
  int8_t value;
};

// oai: x * sigmoid(1.702 * x); where a gate is multiplied, the factor is up + 1 (gpt-oss)
enum class Gated : int {
  none = -1,
  silu = 0,
  gelu = 1,
  gelu_tanh = 2,
  sigmoid = 3,
  relu2 = 4,
  oai = 5,
  softplus = 6,
};
enum class Unary : int {
  none = -1,
  exp = 0,
  log = 1,
  tanh = 2,
  erf = 3,
  gelu = 4,
  gelu_tanh = 5,
  soft_cap = 6,
  relu = 7,
  scale = 8,
  clamp = 9,
  relu2 = 10,
  sigmoid = 11,
  silu = 12
};

// Size that a recorded call is set to before it runs.
struct StepSize {
  int64_t rows;  // tokens, or rows of logits
  int64_t num_reqs;
};

// Minimum data moved and computed by a call, for rooflines.
struct Work {
  double bytes, flops;
};

// Names all members of a kernel's arguments: `members` is the names, `with_members` calls f with
// references. The structured binding makes it an error to forget one.
#define MEMBERS(...)                                   \
  static constexpr const char* members = #__VA_ARGS__; \
  template <class F>                                   \
  void with_members(F f) {                             \
    { [[maybe_unused]] auto& [__VA_ARGS__] = *this; }  \
    f(__VA_ARGS__);                                    \
  }

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Returns the bytes of a key or a value of one head of one token in the cache.
inline int64_t cached_size(CacheType cache, DType dtype, int64_t head_size) {
  if (cache == CacheType::same) return head_size * size_of(dtype);
  return head_size + (cache == CacheType::int8 ? 4 : 0);
}

}  // namespace octavo
