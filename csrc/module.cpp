// Python module octavo._native. Tensors are passed as addresses (tensor.data_ptr()), so that no
// torch header is needed; the callers in octavo/kernels and octavo/attention check shapes and
// types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "barrier.h"
#include "dispatch.h"
#include "expert_cache.h"
#include "inputs.h"
#include "kv_pages.h"
#include "philox.h"
#include "plan.h"
#include "pool.h"
#include "progress.h"
#include "read_memory.h"
#include "suffix_automaton.h"
#include "tensor_module.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

using Address = uintptr_t;
using Release = nb::gil_scoped_release;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Dim dim_of(const std::string& name) {
  for (size_t i = 0; i < kDims.size(); i++)
    if (name == kDims[i]) return static_cast<Dim>(i);
  throw nb::value_error(("no dimension of a step: " + name).c_str());
}

thread_local Plan* recording = nullptr;

// Number of codes of an enumeration.
template <class E>
constexpr int kCodes = 0;
template <>
constexpr int kCodes<DType> = 3;
template <>
constexpr int kCodes<CacheType> = 4;
template <>
constexpr int kCodes<QuantFormat> = 25;
template <>
constexpr int kCodes<Unary> = 14;
template <>
constexpr int kCodes<Gated> = 8;
template <>
constexpr int kCodes<Score> = 4;

// Python value of a member of an argument struct: addresses and codes are numbers.
template <class T>
struct Given {
  using Type = std::conditional_t<std::is_pointer_v<T>, Address,
                                  std::conditional_t<std::is_enum_v<T>, int, T>>;
  static T to(const char* name, Type value) {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(value);
    } else if constexpr (std::is_enum_v<T>) {
      constexpr bool from_none = std::is_same_v<T, Gated> || std::is_same_v<T, Unary>;  // -1
      const int code = value + from_none;
      if (code < 0 || code >= kCodes<T>)
        throw nb::value_error((std::string(name) + ": unknown code " + std::to_string(value)).c_str());
      return static_cast<T>(value);
    } else {
      return (void)name, value;
    }
  }
};

void refuse_recording(const char* name) {
  if (recording) throw std::runtime_error(std::string(name) + " cannot be recorded");
}

// Runs a call, or adds it to the plan that records.
template <class Args>
void submit(const char* name, void (*kernel)(const Args&), const Args& args) {
  if constexpr (requires { args.work(); }) {
    std::string label = name;
    if constexpr (requires { args.n; args.k; })
      label += " " + std::to_string(args.n) + "x" + std::to_string(args.k);
    if (recording) return recording->add(std::move(label), kernel, args);
    Release release;
    run_kernel(label, kernel, args);
  } else {
    refuse_recording(name);
    Release release;
    kernel(args);
  }
}

// Splits "x, x_stride, out" into names.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> names;
  for (size_t from = 0, to; from < text.size(); from = to + 2) {
    to = std::min(text.find(", ", from), text.size());
    names.push_back(text.substr(from, to - from));
  }
  return names;
}

template <class Args, class... T, size_t... I>
void def_kernel(nb::module_& m, const char* name, void (*KernelTable::*kernel)(const Args&),
                std::index_sequence<I...>) {
  static const std::vector<std::string> names = split(Args::members);
  m.def(
      name,
      [=](typename Given<T>::Type... values) {
        Args args;
        args.with_members([&](T&... members) {
          ((members = Given<T>::to(names[I].c_str(), values)), ...);
        });
        submit(name, kernels().*kernel, args);
      },
      nb::kw_only(), nb::arg(names[I].c_str())...);
}

// Defines a kernel as a function whose keywords are the members of its arguments.
template <class Args>
void def_kernel(nb::module_& m, const char* name, void (*KernelTable::*kernel)(const Args&)) {
  Args{}.with_members([&]<class... T>(T&...) {
    def_kernel<Args, T...>(m, name, kernel, std::index_sequence_for<T...>());
  });
}

// Defines the kernel `experts` as a method of a layer that has its weights in a cache.
template <class... T, size_t... I>
void def_cached_experts(nb::class_<ExpertLayer>& layer, std::index_sequence<I...>) {
  static const std::vector<std::string> names = split(ExpertsArgs::members);
  layer.def(
      "experts",
      [](ExpertLayer& layer, typename Given<T>::Type... values) {
        CachedExpertsArgs args;
        args.with_members([&](T&... members) {
          ((members = Given<T>::to(names[I].c_str(), values)), ...);
        });
        args.layer = &layer;
        submit("experts", &cached_experts, args);
      },
      nb::kw_only(), nb::arg(names[I].c_str())...);
}

// Returns the pages wholly inside a read-only mapping of a file to the system.
void release_pages(Address address, size_t nbytes) {
#if defined(__linux__)
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const Address begin = (address + page - 1) / page * page, end = (address + nbytes) / page * page;
  if (begin < end) madvise(at<void>(begin), end - begin, MADV_DONTNEED);
#else
  (void)address, (void)nbytes;
#endif
}

// Has the system allocate pages now instead of on the first write.
void touch_pages(Address address, size_t nbytes) {
#if defined(MADV_POPULATE_WRITE)
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const Address begin = address / page * page, end = (address + nbytes + page - 1) / page * page;
  madvise(at<void>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  (void)address, (void)nbytes;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  available_isas();  // requests permission to use tiles before threads start
  def_tensor(m, [] { refuse_recording("Reading a tensor"); });
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("panel", [] { return kernels().panel; });
  m.def("available_isas", &available_isas);
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name)) throw nb::value_error(("not available on this processor: " + name).c_str());
  });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("work_alone", &work_alone);
  m.def("tuning", [] {
    return nb::make_tuple(tuning.past_caches, spin_microseconds(), tuning.grain);
  });
  m.def("set_tuning", [](bool past_caches, int64_t spin_us, int64_t grain) {
    if (spin_us < 0 || spin_us > 10000 || grain < 0)
      throw nb::value_error("a spin of 0 to 10,000 us and a grain of 0 or more are needed");
    tuning = {past_caches, grain};
    set_spin_microseconds(spin_us);
  });
  m.def("release_pages", &release_pages);
  m.def("touch_pages", &touch_pages, nb::call_guard<nb::gil_scoped_release>());
  m.def("read_memory", [](Address data, size_t nbytes, int locality) {
    if (nbytes % 64 != 0 || locality < -1 || locality > 3)
      throw nb::value_error("whole cache lines and a locality of -1 to 3 are needed");
    Release release;
    return read_memory(at<void>(data), nbytes, locality);
  });

  const auto kv_pages = [](Address from, Address to, Address sums, Address seeds, int64_t pages,
                           int64_t chunks, int64_t chunk_nbytes) {
    if (pages < 0 || chunks < 0 || chunk_nbytes < 0 || chunk_nbytes % 8 != 0)
      throw nb::value_error("chunks are whole numbers of 8 bytes");
    return KvPages{at<const uint64_t>(from), at<const uint64_t>(to), at<const uint64_t>(sums),
                   at<const uint64_t>(seeds), pages, chunks, chunk_nbytes};
  };
  m.def("chunk_sum", [](Address data, size_t nbytes, uint64_t seed) {
    if (nbytes % 8 != 0) throw nb::value_error("chunks are whole numbers of 8 bytes");
    return chunk_sum(at<const char>(data), nbytes, seed);
  });
  m.def(
      "save_pages",
      [=](Address from, Address to, Address sums, Address seeds, int64_t pages, int64_t chunks,
          int64_t chunk_nbytes) {
        const KvPages p = kv_pages(from, to, sums, seeds, pages, chunks, chunk_nbytes);
        Release release;
        save_pages(p);
      },
      nb::kw_only(), nb::arg("from_"), nb::arg("to"), nb::arg("sums"), nb::arg("seeds"),
      nb::arg("pages"), nb::arg("chunks"), nb::arg("chunk_nbytes"));
  m.def(
      "load_pages",
      [=](Address from, Address to, Address sums, Address seeds, int64_t pages, int64_t chunks,
          int64_t chunk_nbytes, Address bad) {
        const KvPages p = kv_pages(from, to, sums, seeds, pages, chunks, chunk_nbytes);
        Release release;
        load_pages(p, at<uint8_t>(bad));
      },
      nb::kw_only(), nb::arg("from_"), nb::arg("to"), nb::arg("sums"), nb::arg("seeds"),
      nb::arg("pages"), nb::arg("chunks"), nb::arg("chunk_nbytes"), nb::arg("bad"));

  nb::class_<Plan>(m, "Plan")
      .def(nb::init<>())
      .def("begin",
           [](Plan& plan) {
             refuse_recording("another plan");
             recording = &plan;
           })
      .def("end", [](Plan&) { recording = nullptr; })
      .def("bind", [](Plan& plan, const std::string& rows) { plan.bind(dim_of(rows)); })
      .def(
          "run",
          [](Plan& plan, int64_t tokens, int64_t requests, int64_t samples) {
            plan.run({tokens, requests, samples});
          },
          nb::call_guard<Release>())
      .def("__len__", &Plan::size);

  m.def("record_call", [](nb::callable function) {
    if (!recording) throw std::runtime_error("no plan records");
    recording->call([function](const StepSizes& sizes) {
      nb::gil_scoped_acquire lock;
      function(sizes[int(Dim::tokens)], sizes[int(Dim::requests)]);
    });
  });

  nb::class_<StepProgress>(m, "StepProgress")
      .def(nb::init<>())
      .def("reset", &StepProgress::reset)
      .def("reach",
           [](StepProgress& progress, int32_t layers) {
             recording ? recording->mark(progress, layers) : progress.reach(layers);
           })
      .def("wait", &StepProgress::wait, nb::call_guard<Release>());

  using ByName = std::map<std::string, Address>;
  nb::class_<StepArrays>(m, "StepArrays")
      .def("__init__", [](StepArrays* self, int64_t tokens, int64_t requests, int64_t samples,
                          const ByName& at) {
        new (self) StepArrays(tokens, requests, samples, {at});
      });
  nb::class_<InputGatherer>(m, "InputGatherer")
      .def("__init__",
           [](InputGatherer* self, int64_t max_num_seqs, int64_t max_model_len, int64_t groups,
              int64_t blocks, int64_t block_size, const ByName& at) {
             new (self)
                 InputGatherer(max_num_seqs, max_model_len, groups, blocks, block_size, {at});
           })
      .def("run", &InputGatherer::run);

  nb::class_<SuffixAutomaton>(m, "SuffixAutomaton")
      .def(nb::init<>())
      .def("__len__", &SuffixAutomaton::size)
      .def_prop_ro("nbytes", &SuffixAutomaton::nbytes)
      .def("add", [](SuffixAutomaton& automaton, Address tokens,
                     int64_t count) { automaton.add(at<const int32_t>(tokens), count); })
      .def("match", [](const SuffixAutomaton& automaton, Address tokens, int64_t count,
                       int64_t most) { return automaton.match(at<const int32_t>(tokens), count, most); });

  nb::class_<ExpertLayer> expert_layer(m, "ExpertLayer");
  ExpertsArgs{}.with_members([&]<class... T>(T&...) {
    def_cached_experts<T...>(expert_layer, std::index_sequence_for<T...>());
  });
  expert_layer.def(
      "expect",
      [](ExpertLayer& layer, Address ids, int64_t tokens, int64_t top_k) {
        submit("expected_experts", &expected_experts,
               ExpectedExpertsArgs{at<const int32_t>(ids), tokens, top_k, &layer});
      },
      nb::kw_only(), nb::arg("ids"), nb::arg("tokens"), nb::arg("top_k"));
  nb::class_<ExpertCache>(m, "ExpertCache")
      .def(
          "__init__",
          [](ExpertCache* self, nb::object memory, int64_t slot_nbytes, int64_t slots, Address counts) {
            const auto begin = nb::cast<Address>(memory.attr("data_ptr")());
            new (self) ExpertCache(at<char>(begin), slot_nbytes, slots, at<int64_t>(counts));
          },
          nb::keep_alive<1, 2>(), nb::kw_only(), nb::arg("memory"), nb::arg("slot_nbytes"), nb::arg("slots"), nb::arg("counts"))
      .def(
          "add_layer",
          [](ExpertCache& cache, const std::vector<int64_t>& begins, int64_t nbytes, int64_t down) {
            return cache.add_layer(begins, nbytes, down);
          },
          nb::rv_policy::reference_internal, nb::kw_only(), nb::arg("begins"), nb::arg("nbytes"),
          nb::arg("down"))
      .def("open", &ExpertCache::open)
      .def("count_in",
           [](ExpertCache& cache, Address counts) { cache.count_in(at<int64_t>(counts)); })
      .def("release", &ExpertCache::release)
      .def("take_error", &ExpertCache::take_error);

  m.def("share_rows", [](int64_t index, int64_t size) {
    if (recording) recording->share({index, size});
  });

  m.def("set_profiling", [](bool on) { profile.on = on; });
  m.def("take_spans", [] {
    std::vector<Span> spans;
    {
      std::lock_guard lock(profile.mutex);
      spans.swap(profile.spans);
    }
    std::vector<std::tuple<std::string, double, double, double, double, int64_t>> result;
    for (const Span& s : spans)
      result.emplace_back(s.name, s.start, s.end, s.work.bytes, s.work.flops, s.rows);
    return result;
  });

  nb::exception<GroupError>(m, "GroupError", PyExc_RuntimeError);
  m.def(
      "shared_barrier",
      [](Address barrier, Address arrivals, int64_t ranks, double timeout) {
        submit("shared_barrier", &shared_barrier,
               BarrierArgs{at<SharedBarrier>(barrier), at<SharedCounter>(arrivals), ranks, timeout,
                           0});
      },
      nb::kw_only(), nb::arg("barrier"), nb::arg("arrivals"), nb::arg("ranks"),
      nb::arg("timeout"));
  m.def("break_group", [](Address barrier) { break_group(at<SharedBarrier>(barrier)); });
  // Only while no process waits at the barrier
  m.def("mend_group", [](Address barrier) { mend_group(at<SharedBarrier>(barrier)); });
  m.def("group_broken", [](Address barrier) { return at<SharedBarrier>(barrier)->broken.load() != 0; });

  m.def("counter_post", [](Address counter, uint32_t value) {
    counter_post(at<SharedCounter>(counter), value);
  });
  m.def("counter_value", [](Address counter) { return at<SharedCounter>(counter)->value.load(); });
  m.def("counter_reached", [](Address counter, uint32_t value) {
    return counter_reached(*at<SharedCounter>(counter), value);
  });
  m.def(
      "counter_wait",
      [](Address counter, uint32_t value, Address barrier, double timeout) {
        Release release;
        counter_wait(at<SharedCounter>(counter), value, *at<SharedBarrier>(barrier), timeout);
      },
      nb::kw_only(), nb::arg("counter"), nb::arg("value"), nb::arg("barrier"), nb::arg("timeout"));

  m.def("linear_scratch", [](int64_t rows, int64_t k, int64_t threads) {
    return kernels().linear_scratch(rows, k, threads);
  });
  m.def("philox_uniforms", [](Address seeds, Address positions, uint32_t stream, int64_t count,
                              Address out) {
    refuse_recording("philox_uniforms");
    philox_uniforms(at<uint64_t>(seeds), at<uint32_t>(positions), stream, count, at<double>(out));
  });

  nb::module_ functions = m.def_submodule("kernels");
#define KERNEL(name, Args) def_kernel(functions, #name, &KernelTable::name);
  OCTAVO_KERNELS(KERNEL)
#undef KERNEL
}
