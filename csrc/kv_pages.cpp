#include "kv_pages.h"

#include <cstring>

#include "pool.h"

namespace octavo {
namespace {

typedef uint64_t vec __attribute__((vector_size(16)));
constexpr size_t kVecs = 8, kStride = kVecs * sizeof(vec);
constexpr int64_t kPiece = 1 << 18;  // bytes of a thread's piece

constexpr uint64_t kSpread = 0x9e3779b97f4a7c15u, kLow = 0xffffffffu;

inline uint64_t mix(uint64_t x) {  // the finalizer of SplitMix64: every bit depends on all
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Copies and sums at the same time, in sixteen columns of 64 bits. A plain sum changes with every
// number. The other sum multiplies a number's halves, changed by a key of their place, so that a
// second change is unlikely to compensate a first (as in XXH3).
template <bool Copy>
uint64_t pass(const char* from, char* to, size_t nbytes, uint64_t seed) {
  vec first[kVecs] = {}, second[kVecs] = {}, key = {kSpread, 3 * kSpread};
  size_t i = 0;
  for (; i + kStride <= nbytes; i += kStride) {
    for (size_t j = 0; j < kVecs; j++) {
      vec v;
      memcpy(&v, from + i + j * sizeof v, sizeof v);
      if constexpr (Copy) memcpy(to + i + j * sizeof v, &v, sizeof v);
      first[j] += v;
      const vec x = v ^ key;
      second[j] += (x & kLow) * (x >> 32);
      key += kSpread;
    }
  }
  uint64_t sum = mix(seed + kSpread * (nbytes + 1));
  for (; i < nbytes; i += sizeof(uint64_t)) {
    uint64_t v;
    memcpy(&v, from + i, sizeof v);
    if constexpr (Copy) memcpy(to + i, &v, sizeof v);
    sum = mix(sum ^ v) + v;
  }
  for (size_t j = 0; j < kVecs; j++)
    for (size_t k = 0; k < sizeof(vec) / sizeof(uint64_t); k++)
      sum = mix(sum ^ first[j][k]) + mix(second[j][k] + sum);
  return sum ? sum : 1;
}

// Calls `one` for each chunk: its index in the page, its bytes' offset, and its sum.
template <class F>
void each_chunk(const KvPages& p, int64_t page, F one) {
  const char* from = reinterpret_cast<const char*>(p.from[page]);
  char* to = reinterpret_cast<char*>(p.to[page]);
  for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
    const int64_t at = chunk * p.chunk_nbytes;
    one(chunk, pass<true>(from + at, to + at, size_t(p.chunk_nbytes),
                          p.seeds[page] + uint64_t(chunk)));
  }
}

struct Load {
  const KvPages& p;
  uint8_t* bad;
};

void load(void* context, int64_t begin, int64_t end) {
  const Load& job = *static_cast<Load*>(context);
  for (int64_t page = begin; page < end; page++) {
    const uint64_t* sums = reinterpret_cast<const uint64_t*>(job.p.sums[page]);
    uint8_t wrong = 0;
    each_chunk(job.p, page, [&](int64_t i, uint64_t sum) { wrong |= sums[i] != sum; });
    job.bad[page] = wrong;
  }
}

}  // namespace

uint64_t chunk_sum(const char* data, size_t nbytes, uint64_t seed) {
  return pass<false>(data, nullptr, nbytes, seed);
}

void save_pages(const KvPages& p) {
  for (int64_t page = 0; page < p.pages; page++) {
    uint64_t* sums = reinterpret_cast<uint64_t*>(p.sums[page]);
    each_chunk(p, page, [&](int64_t i, uint64_t sum) { sums[i] = sum; });
  }
}

void load_pages(const KvPages& p, uint8_t* bad) {
  const int64_t nbytes = p.chunks * p.chunk_nbytes;
  const int64_t pages = nbytes < kPiece ? kPiece / (nbytes ? nbytes : 1) : 1;
  Load job{p, bad};
  run_parallel(p.pages, pages, p.pages * nbytes > kPiece, load, &job);
}

}  // namespace octavo
