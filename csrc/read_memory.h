// Read bandwidth of memory without computation: the basis of rooflines.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Reads the whole buffer by all threads, and returns the XOR of its 64-bit words, so that no read
// can be optimized away. `locality`: lines are prefetched 2 KB ahead with a locality from 0
// (prefetchnta) to 3 (prefetcht0), or not at all: -1. `nbytes` is a multiple of 64.
uint64_t read_memory(const void* data, size_t nbytes, int locality);

}  // namespace octavo
