#include "dispatch.h"

#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>

#if defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace octavo {

#if defined(__x86_64__)
namespace amx {
extern const KernelTable table;
bool tiles_work();
}
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace avx512_vnni {
void linear_q(const LinearQArgs& a);
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx2_vnni {
void linear_q(const LinearQArgs& a);
}
namespace avx2 {
extern const KernelTable table;
}
#endif
#if defined(__aarch64__)
namespace neon_bf16 {
extern const KernelTable table;
}
namespace neon_dotprod {
void linear_q(const LinearQArgs& a);
}
namespace neon {
extern const KernelTable table;
}
#else
namespace portable {
extern const KernelTable table;
}
#endif
namespace amx_emulated {
extern const KernelTable table;
}

#if defined(__x86_64__)
// Returns true if this process may use AMX: the processor can multiply tiles of bfloat16 and of
// bytes of the usual size, the system saves the tiles, and it grants permission, which holds for
// all threads. Kernels before Linux 5.16, some virtual machines and sandboxes do not.
static bool may_use_tiles() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  const unsigned row_bytes = b & 0xffff, tiles = b >> 16, rows = c & 0xffff;
  if (row_bytes != 64 || tiles != 8 || rows != 16) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr unsigned kSaved = 3u << 17;  // XTILECFG, XTILEDATA
  if ((a & kSaved) != kSaved) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Makes a variant with its own products with quantized weights; all other kernels are `table`'s.
static KernelTable with_products(KernelTable table, const char* isa,
                                 void (*linear_q)(const LinearQArgs&)) {
  table.isa = isa;
  table.linear_q = linear_q;
  return table;
}

// Zen 5 reads 50 GB/s by any prefetch, and a decode step of smollm2-135m gains 3 % by this one. On
// Intel this prefetch only uses the few line buffers of L1: 10 to 15 GB/s, while others read 28.
#if defined(__x86_64__)
static const bool past_caches = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
#else
static const bool past_caches = false;
#endif
Tuning tuning{past_caches, 10000};

static std::vector<const KernelTable*> find_available() {
  std::vector<const KernelTable*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  __get_cpuid(1, &a, &b, &c, &d);  // older clangs do not know "f16c"
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (c & bit_F16C);
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Every processor with bfloat16 products has byte products (VNNI), too.
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") &&
                        __builtin_cpu_supports("avx512vnni");
  // CMakeLists.txt selects the variants.
#if defined(OCTAVO_HAS_amx)
  // Every processor with AMX has VBMI; a hypervisor may hide it.
  if (has_bf16 && __builtin_cpu_supports("avx512vbmi") && may_use_tiles() && amx::tiles_work())
    found.push_back(&amx::table);
#endif
  // A core of Emerald Rapids makes 87 billion operations a second by the dot products of bfloat16, and
  // 175 by the multiply-adds of float32: there it is faster to widen the numbers.
  const bool slow_bf16 = __builtin_cpu_is("intel");
#if defined(OCTAVO_HAS_avx512_bf16)
  if (has_bf16 && !slow_bf16) found.push_back(&avx512_bf16::table);
#endif
#if defined(OCTAVO_HAS_avx512_vnni)
  static const KernelTable bytes512 =
      with_products(avx512::table, "avx512_vnni", avx512_vnni::linear_q);
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&bytes512);
#endif
#if defined(OCTAVO_HAS_avx512_bf16)
  if (has_bf16 && slow_bf16) found.push_back(&avx512_bf16::table);
#endif
#if defined(OCTAVO_HAS_avx512)
  if (has_avx512) found.push_back(&avx512::table);
#endif
#if defined(OCTAVO_HAS_avx2_vnni)
  static const KernelTable bytes2 = with_products(avx2::table, "avx2_vnni", avx2_vnni::linear_q);
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&bytes2);
#endif
#if defined(OCTAVO_HAS_avx2)
  if (has_avx2) found.push_back(&avx2::table);
#endif
#endif
#if defined(__aarch64__)
#if defined(__APPLE__)
  auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  const bool has_dotprod = has("hw.optional.arm.FEAT_DotProd");
  const bool has_bf16 = has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_I8MM");
#else
  const bool has_dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  const unsigned long more = getauxval(AT_HWCAP2);
  const bool has_bf16 = (more & HWCAP2_BF16) && (more & HWCAP2_I8MM);
#endif
  if (has_dotprod && has_bf16) found.push_back(&neon_bf16::table);
  static const KernelTable dotprod =
      with_products(neon::table, "neon_dotprod", neon_dotprod::linear_q);
  if (has_dotprod) found.push_back(&dotprod);
  found.push_back(&neon::table);
#endif
#if defined(OCTAVO_HAS_portable)
  found.push_back(&portable::table);
#endif
#if defined(OCTAVO_HAS_amx_emulated)
  found.push_back(&amx_emulated::table);
#endif
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

// Returns the variant that OCTAVO_ISA names; if it is unset, the best.
static const KernelTable* first_choice() {
  if (available().empty())
    throw std::invalid_argument(
        "The kernels were built for another machine only, and this processor cannot run them; build "
        "Octavo again here (make install), or install its wheel, which has kernels for all.");
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
  thread_local Buffer buffers[4];
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

void top_k(const TopKArgs& a) {
  auto one = [&](int64_t row) {
    const int64_t k = a.k;
    const float* from = a.x + row * a.x_stride;
    using Entry = std::pair<float, int64_t>;
    auto before = [](const Entry& a, const Entry& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<Entry> heap;  // the smallest of the k largest on top
    heap.reserve(k);
    for (int64_t i = 0; i < a.dim; i++) {
      const float v = from[i] == from[i] ? from[i] : -__builtin_inff();
      if (int64_t(heap.size()) < k) {
        heap.emplace_back(v, i);
        std::push_heap(heap.begin(), heap.end(), before);
      } else if (k > 0 && v > heap.front().first) {  // an equal number has a higher index: it loses
        std::pop_heap(heap.begin(), heap.end(), before);
        heap.back() = {v, i};
        std::push_heap(heap.begin(), heap.end(), before);
      }
    }
    std::sort_heap(heap.begin(), heap.end(), before);
    for (int64_t i = 0; i < k; i++) {
      a.values[row * k + i] = heap[i].first;
      a.indices[row * k + i] = heap[i].second;
    }
  };
  run_parallel(
      a.rows, 1, true,
      [](void* context, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) (*static_cast<decltype(one)*>(context))(row);
      },
      &one);
}

}  // namespace octavo
