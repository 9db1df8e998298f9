// How fast memory can be read when nothing is done with it: what rooflines are made of.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Reads all of it by all threads, and returns the exclusive or of its numbers of 64 bits, so that
// nothing can be left out. `locality`: lines are fetched 2 KB ahead to stay in the caches for so
// long, 0 (prefetchnta) to 3 (prefetcht0), or not at all: -1. `nbytes` is a multiple of 64.
uint64_t read_memory(const void* data, size_t nbytes, int locality);

}  // namespace octavo
