// Pages of the KV cache on their way to and from other memory, each with sums of what is in it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Equal pages of so many chunks, one after the other, each with a sum of its own.
struct KvPages {
  const uint64_t* from;  // addresses [pages]
  const uint64_t* to;
  const uint64_t* sums;   // addresses of uint64 [chunks] each
  const uint64_t* seeds;  // [pages]; chunk i of a page has seed + i
  int64_t pages, chunks, chunk_nbytes;  // a chunk is a multiple of 8 bytes
};

// A number that depends on every bit, on its place and on the seed; never that of all zeros for a
// sum that was not written (zero).
uint64_t chunk_sum(const char* data, size_t nbytes, uint64_t seed);

// Copies pages and writes their sums, on the calling thread alone: others compute meanwhile.
void save_pages(const KvPages& p);

// Copies pages back; bad [pages] is 1 where a sum is another one, and the copy is not to be used.
void load_pages(const KvPages& p, uint8_t* bad);

}  // namespace octavo
