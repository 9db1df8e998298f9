#include "read_memory.h"

#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace octavo {
namespace {

typedef uint64_t vec __attribute__((vector_size(16)));  // load size of every processor of an architecture
constexpr size_t kLine = 64, kAhead = 2048, kPart = 1 << 20;

template <int Locality>
uint64_t read_part(const char* data, size_t nbytes) {
  vec sums[kLine / sizeof(vec)] = {};
  for (size_t i = 0; i < nbytes; i += kLine) {
    if constexpr (Locality >= 0) __builtin_prefetch(data + i + kAhead, 0, Locality);
#pragma GCC unroll 4
    for (size_t j = 0; j < kLine / sizeof(vec); j++) {
      vec v;
      memcpy(&v, data + i + j * sizeof v, sizeof v);
      sums[j] ^= v;
    }
  }
  uint64_t sum = 0;
  for (vec v : sums) sum ^= v[0] ^ v[1];
  return sum;
}

struct Job {
  const char* data;
  size_t nbytes;
  uint64_t (*read)(const char*, size_t);
  std::atomic<uint64_t> sum{0};
};

}  // namespace

uint64_t read_memory(const void* data, size_t nbytes, int locality) {
  static constexpr decltype(Job::read) kReads[] = {read_part<-1>, read_part<0>, read_part<1>,
                                                   read_part<2>, read_part<3>};
  Job job{static_cast<const char*>(data), nbytes, kReads[locality + 1]};
  auto part = [](void* context, int64_t begin, int64_t end) {
    Job& job = *static_cast<Job*>(context);
    const size_t from = begin * kPart, to = std::min(job.nbytes, end * kPart);
    job.sum.fetch_xor(job.read(job.data + from, to - from));
  };
  run_parallel((nbytes + kPart - 1) / kPart, 1, true, part, &job);
  return job.sum;
}

}  // namespace octavo
