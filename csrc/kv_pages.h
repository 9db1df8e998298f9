// Copies of pages of the KV cache to and from other memory, each with checksums.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Pages of equal size: consecutive chunks, each with a checksum.
struct KvPages {
  const uint64_t* from;  // addresses [pages]
  const uint64_t* to;
  const uint64_t* sums;   // addresses of uint64 [chunks] each
  const uint64_t* seeds;  // [pages]; chunk i of a page has seed + i
  int64_t pages, chunks, chunk_nbytes;  // a chunk is a multiple of 8 bytes
};

// Returns a number that depends on every bit, its place and the seed; never zero, which marks a sum
// that was not written.
uint64_t chunk_sum(const char* data, size_t nbytes, uint64_t seed);

// Copies pages and writes their sums, on the calling thread alone: other threads compute meanwhile.
void save_pages(const KvPages& p);

// Copies pages back; sets bad [pages] to 1 where a sum does not match: do not use that copy.
void load_pages(const KvPages& p, uint8_t* bad);

}  // namespace octavo
