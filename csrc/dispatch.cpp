#include "dispatch.h"

#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>

namespace octavo {

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace avx512_vnni {
extern void (*const byte_product)(const LinearQArgs&);
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx2_vnni {
extern void (*const byte_product)(const LinearQArgs&);
}
namespace avx2 {
extern const KernelTable table;
}
#endif
namespace portable {
extern const KernelTable table;
}

#if defined(__x86_64__)
// A variant that has products of bytes of its own; all else is `table`'s.
static KernelTable with_bytes(KernelTable table, const char* isa,
                              void (*byte_product)(const LinearQArgs&)) {
  table.isa = isa;
  table.linear_q = byte_product;
  return table;
}
#endif

static std::vector<const KernelTable*> find_available() {
  std::vector<const KernelTable*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Every processor with bfloat16 products has byte products (VNNI), too.
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    found.push_back(&avx512_bf16::table);
  static const KernelTable bytes512 =
      with_bytes(avx512::table, "avx512_vnni", avx512_vnni::byte_product);
  static const KernelTable bytes2 = with_bytes(avx2::table, "avx2_vnni", avx2_vnni::byte_product);
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&bytes512);
  if (has_avx512) found.push_back(&avx512::table);
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&bytes2);
  if (has_avx2) found.push_back(&avx2::table);
#endif
  found.push_back(&portable::table);
  return found;
}

static const std::vector<const KernelTable*>& available() {
  static const std::vector<const KernelTable*> tables = find_available();
  return tables;
}

static const KernelTable* find(const std::string& name) {
  for (const KernelTable* table : available())
    if (name == table->isa) return table;
  return nullptr;
}

// At first the variant that OCTAVO_ISA names; without it, the best.
static const KernelTable* first_choice() {
  const char* name = std::getenv("OCTAVO_ISA");
  if (!name || !*name) return available().front();
  if (const KernelTable* table = find(name)) return table;
  std::string names;
  for (const KernelTable* table : available()) names += std::string(" ") + table->isa;
  throw std::invalid_argument(std::string("OCTAVO_ISA=") + name +
                              ": this processor has kernels for" + names +
                              "; set it to one of these, or unset it.");
}

static const KernelTable*& chosen() {
  static const KernelTable* table = first_choice();
  return table;
}

const KernelTable& kernels() { return *chosen(); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available()) names.push_back(table->isa);
  return names;
}

bool set_isa(const std::string& name) {
  const KernelTable* table = find(name);
  if (table) chosen() = table;
  return table != nullptr;
}

void* scratch(size_t bytes, int which) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[3];
  Buffer& buffer = buffers[which];
  if (buffer.size < bytes) {
    const size_t size = (bytes + 63) / 64 * 64;
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(64, size);
    buffer.size = buffer.data ? size : 0;
    if (!buffer.data) throw std::bad_alloc();
  }
  return buffer.data;
}

void sort_descending(uint64_t* keys, int64_t count) {
  std::sort(keys, keys + count, std::greater<>());
}

void top_k(const float* x, int64_t x_stride, int64_t rows, int64_t dim, int64_t k, float* values,
           int64_t* indices) {
  auto one = [&](int64_t row) {
    const float* from = x + row * x_stride;
    using Entry = std::pair<float, int64_t>;
    auto before = [](const Entry& a, const Entry& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<Entry> heap;  // the worst of the k best on top
    heap.reserve(k);
    for (int64_t i = 0; i < dim; i++) {
      const float v = from[i] == from[i] ? from[i] : -__builtin_inff();
      if (int64_t(heap.size()) < k) {
        heap.emplace_back(v, i);
        std::push_heap(heap.begin(), heap.end(), before);
      } else if (k > 0 && v > heap.front().first) {  // an equal one comes later: it loses
        std::pop_heap(heap.begin(), heap.end(), before);
        heap.back() = {v, i};
        std::push_heap(heap.begin(), heap.end(), before);
      }
    }
    std::sort_heap(heap.begin(), heap.end(), before);
    for (int64_t i = 0; i < k; i++) {
      values[row * k + i] = heap[i].first;
      indices[row * k + i] = heap[i].second;
    }
  };
  run_parallel(
      rows, 1, true,
      [](void* context, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) (*static_cast<decltype(one)*>(context))(row);
      },
      &one);
}

}  // namespace octavo
