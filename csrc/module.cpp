// Python's way in: octavo._native. Tensors come as addresses (tensor.data_ptr()), so that no torch
// header is needed; the callers in octavo/kernels and octavo/attention check shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "dispatch.h"
#include "inputs.h"
#include "philox.h"
#include "plan.h"
#include "pool.h"
#include "read_memory.h"

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

DType dtype_of(int code) {
  if (code < 0 || code > 2) throw nb::value_error("unknown dtype code");
  return static_cast<DType>(code);
}

CacheType cache_type_of(int code) {
  if (code < 0 || code > 3) throw nb::value_error("unknown cache type code");
  return static_cast<CacheType>(code);
}

thread_local Plan* recording = nullptr;

// Carries a call out, or notes it in the plan that records.
template <class Args>
void submit(std::string name, void (*kernel)(const Args&), const Args& args) {
  if (recording) return recording->add(std::move(name), kernel, args);
  Release release;
  run_kernel(name, kernel, args);
}

// Gives the pages wholly inside a read-only mapping of a file back to the system.
void release_pages(Address address, size_t nbytes) {
#if defined(__linux__)
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const Address begin = (address + page - 1) / page * page, end = (address + nbytes) / page * page;
  if (begin < end) madvise(at<void>(begin), end - begin, MADV_DONTNEED);
#else
  (void)address, (void)nbytes;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  available_isas();  // asks for permission to use tiles, before there are threads
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("panel", [] { return kernels().panel; });
  m.def("available_isas", &available_isas);
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name)) throw nb::value_error(("not available on this processor: " + name).c_str());
  });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("release_pages", &release_pages);
  m.def("read_memory", [](Address data, size_t nbytes, int locality) {
    if (nbytes % 64 != 0 || locality < -1 || locality > 3)
      throw nb::value_error("whole cache lines and a locality of -1 to 3 are needed");
    Release release;
    return read_memory(at<void>(data), nbytes, locality);
  });

  nb::class_<Plan>(m, "Plan")
      .def(nb::init<>())
      .def("begin", [](Plan& plan) { recording = &plan; })
      .def("end", [](Plan&) { recording = nullptr; })
      .def("bind", [](Plan& plan, const std::string& rows) { plan.bind(dim_of(rows)); })
      .def(
          "run",
          [](Plan& plan, int64_t tokens, int64_t requests, int64_t samples) {
            plan.run({tokens, requests, samples});
          },
          nb::call_guard<Release>())
      .def("__len__", &Plan::size);

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

  m.def(
      "pack_weight",
      [](Address src, int64_t src_stride, Address dst, int64_t row0, int64_t rows, int64_t n,
         int64_t k, int src_dtype, int dtype) {
        const PackArgs args = {at<void>(src), src_stride, at<void>(dst),       row0,
                               rows,          n,          k, dtype_of(src_dtype),
                               dtype_of(dtype)};
        Release release;
        kernels().pack_weight(args);
      });

  m.def("linear", [](Address x, int64_t x_stride, Address weight, Address bias, Address out,
                     int64_t out_stride, int64_t rows, int64_t n, int64_t k, int gated, int dtype,
                     int out_dtype) {
    submit("linear " + std::to_string(n) + "x" + std::to_string(k), kernels().linear,
           {at<void>(x), x_stride, at<void>(weight), at<void>(bias), at<void>(out), out_stride,
            rows, n, k, static_cast<Gated>(gated), dtype_of(dtype), dtype_of(out_dtype)});
  });

  m.def("linear_scratch", [](int64_t rows, int64_t k, int64_t threads) {
    return kernels().linear_scratch(rows, k, threads);
  });

  m.def("quantize_weight", [](Address src, int64_t src_stride, Address dst, int64_t row0,
                              int64_t rows, int64_t n, int64_t k, int64_t group, int format,
                              int dtype) {
    const QuantizeArgs args = {at<void>(src), src_stride, at<void>(dst), row0, rows, n, k, group,
                               static_cast<QuantFormat>(format), dtype_of(dtype)};
    Release release;
    kernels().quantize_weight(args);
  });

  m.def("pack_quant", [](Address codes, Address scales, Address zeros, Address dst, int64_t row0,
                         int64_t rows, int64_t n, int64_t k, int64_t group, int format) {
    const PackQuantArgs args = {at<uint8_t>(codes), at<float>(scales), at<uint8_t>(zeros),
                                at<void>(dst), row0, rows, n, k, group,
                                static_cast<QuantFormat>(format)};
    Release release;
    kernels().pack_quant(args);
  });

  m.def("linear_q", [](Address x, int64_t x_stride, Address weight, Address bias, Address out,
                       int64_t out_stride, int64_t rows, int64_t n, int64_t k, int64_t group,
                       int format, int gated, int dtype, int out_dtype) {
    submit("linear_q " + std::to_string(n) + "x" + std::to_string(k), kernels().linear_q,
           {at<void>(x), x_stride, at<void>(weight), at<void>(bias), at<void>(out), out_stride,
            rows, n, k, group, static_cast<QuantFormat>(format), static_cast<Gated>(gated),
            dtype_of(dtype), dtype_of(out_dtype)});
  });

  m.def("rms_norm", [](Address x, int64_t x_stride, int64_t x_head_stride, Address residual,
                       Address residual_out, Address weight, Address out, int64_t out_stride,
                       int64_t out_head_stride, int64_t rows, int64_t heads, int64_t dim,
                       float eps, float weight_offset, int dtype) {
    submit("rms_norm", kernels().rms_norm,
           {at<void>(x), x_stride, x_head_stride, at<void>(residual), at<void>(residual_out),
            at<void>(weight), nullptr, at<void>(out), out_stride, out_head_stride, rows, heads,
            dim, eps, weight_offset, dtype_of(dtype)});
  });

  m.def("layer_norm", [](Address x, int64_t x_stride, Address weight, Address bias, Address out,
                         int64_t rows, int64_t dim, float eps, int dtype) {
    submit("layer_norm", kernels().layer_norm,
           {at<void>(x), x_stride, 0, nullptr, nullptr, at<void>(weight), at<void>(bias),
            at<void>(out), dim, 0, rows, 1, dim, eps, 0.0f, dtype_of(dtype)});
  });

  m.def("gated", [](int kind, Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim,
                    int dtype) {
    submit("gated", kernels().gated,
           {at<void>(x), x_stride, at<void>(out), rows, dim, static_cast<Gated>(kind),
            dtype_of(dtype)});
  });

  m.def("unary", [](int kind, Address x, Address out, int64_t rows, int64_t dim, float param,
                    int dtype) {
    submit("unary", kernels().unary,
           {at<void>(x), at<void>(out), rows, dim, param, static_cast<Unary>(kind),
            dtype_of(dtype)});
  });

  m.def("add", [](Address x, Address y, Address out, int64_t rows, int64_t dim, int dtype) {
    submit("add", kernels().add,
           {at<void>(x), at<void>(y), at<void>(out), rows, dim, dtype_of(dtype)});
  });

  m.def("gather", [](Address table, int64_t table_stride, int64_t n, Address ids, Address out,
                     int64_t rows, int64_t dim, bool packed, int dtype) {
    submit("gather", kernels().gather,
           {at<void>(table), table_stride, n, at<int64_t>(ids), at<void>(out), rows, dim, packed,
            dtype_of(dtype)});
  });

  m.def("rotary", [](Address positions, Address query, int64_t query_stride,
                     int64_t query_head_stride, int64_t query_heads, Address key,
                     int64_t key_stride, int64_t key_head_stride, int64_t key_heads,
                     Address cos_sin, int64_t tokens, int64_t rotary_dim, bool is_neox, int dtype) {
    submit("rotary", kernels().rotary,
           {at<int64_t>(positions), at<void>(query), query_stride, query_head_stride, query_heads,
            at<void>(key), key_stride, key_head_stride, key_heads, at<float>(cos_sin), tokens,
            rotary_dim, is_neox, dtype_of(dtype)});
  });

  m.def("softmax",
        [](Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim, bool log) {
          submit("softmax", kernels().softmax,
                 {at<float>(x), x_stride, at<float>(out), rows, dim, log});
        });

  m.def("argmax", [](Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim) {
    submit("argmax", kernels().argmax, {at<float>(x), x_stride, at<int64_t>(out), rows, dim});
  });

  m.def("row_max", [](Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim) {
    submit("row_max", kernels().row_max, {at<float>(x), x_stride, at<float>(out), rows, dim});
  });

  m.def("sample", [](Address x, int64_t x_stride, Address params, Address out, int64_t rows,
                     int64_t dim) {
    submit("sample", kernels().sample,
           {at<float>(x), x_stride, at<SamplingRow>(params), at<int64_t>(out), rows, dim});
  });

  m.def("philox_uniforms", [](Address seeds, Address positions, uint32_t stream, int64_t count,
                              Address out) {
    philox_uniforms(at<uint64_t>(seeds), at<int64_t>(positions), stream, count, at<double>(out));
  });

  m.def("top_k", [](Address x, int64_t x_stride, int64_t rows, int64_t dim, int64_t k,
                    Address values, Address indices) {
    Release release;
    top_k(at<float>(x), x_stride, rows, dim, k, at<float>(values), at<int64_t>(indices));
  });

  m.def("write_kv", [](Address key, int64_t key_stride, int64_t key_head_stride, Address value,
                       int64_t value_stride, int64_t value_head_stride, Address kv_cache,
                       Address slot_mapping, int64_t tokens, int64_t kv_heads, int64_t head_size,
                       int64_t block_size, int dtype, int cache) {
    submit("write_kv", kernels().write_kv,
           {at<void>(key), key_stride, key_head_stride, at<void>(value), value_stride,
            value_head_stride, at<void>(kv_cache), at<int64_t>(slot_mapping), tokens, kv_heads,
            head_size, block_size, dtype_of(dtype), cache_type_of(cache)});
  });

  m.def("attention", [](Address query, int64_t query_stride, int64_t query_head_stride,
                        Address out, int64_t out_stride, int64_t out_head_stride,
                        Address kv_cache, Address query_start_loc, Address seq_lens,
                        Address block_table, int64_t block_table_stride, int64_t num_reqs,
                        int64_t heads, int64_t kv_heads, int64_t head_size, int64_t block_size,
                        int64_t window, float scale, float soft_cap, Address alibi_slopes,
                        int dtype, int cache) {
    submit("attention", kernels().attention,
           {at<void>(query), query_stride, query_head_stride, at<void>(out), out_stride,
            out_head_stride, at<void>(kv_cache), at<int32_t>(query_start_loc),
            at<int32_t>(seq_lens), at<int32_t>(block_table), block_table_stride, num_reqs, heads,
            kv_heads, head_size, block_size, window, scale, soft_cap, at<float>(alibi_slopes),
            dtype_of(dtype), cache_type_of(cache)});
  });
}
