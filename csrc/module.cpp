// Python's way in: octavo._native. Tensors come as addresses (tensor.data_ptr()), so that no torch
// header is needed; the callers in octavo/kernels and octavo/attention check shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

DType dtype_of(int code) {
  if (code < 0 || code > 2) throw nb::value_error("unknown dtype code");
  return static_cast<DType>(code);
}

}  // namespace

NB_MODULE(_native, m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;

  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("panel", [] { return kernels().panel; });
  m.def("available_isas", &available_isas);
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name)) throw nb::value_error(("not available on this processor: " + name).c_str());
  });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);

  m.def(
      "pack_weight",
      [](Address src, int64_t src_stride, Address dst, int64_t row0, int64_t rows, int64_t n,
         int64_t k, int dtype) {
        kernels().pack_weight(
            {at<void>(src), src_stride, at<void>(dst), row0, rows, n, k, dtype_of(dtype)});
      },
      Release());

  m.def(
      "linear",
      [](Address x, int64_t x_stride, Address weight, Address bias, Address out, int64_t out_stride,
         int64_t rows, int64_t n, int64_t k, int dtype, int out_dtype) {
        kernels().linear({at<void>(x), x_stride, at<void>(weight), at<void>(bias), at<void>(out),
                          out_stride, rows, n, k, dtype_of(dtype), dtype_of(out_dtype)});
      },
      Release());

  m.def(
      "quantize_weight",
      [](Address src, int64_t src_stride, Address dst, int64_t row0, int64_t rows, int64_t n,
         int64_t k, int64_t group, int format, int dtype) {
        kernels().quantize_weight({at<void>(src), src_stride, at<void>(dst), row0, rows, n, k,
                                   group, static_cast<QuantFormat>(format), dtype_of(dtype)});
      },
      Release());

  m.def(
      "pack_quant",
      [](Address codes, Address scales, Address zeros, Address dst, int64_t row0, int64_t rows,
         int64_t n, int64_t k, int64_t group, int format) {
        kernels().pack_quant({at<uint8_t>(codes), at<float>(scales), at<uint8_t>(zeros),
                              at<void>(dst), row0, rows, n, k, group,
                              static_cast<QuantFormat>(format)});
      },
      Release());

  m.def(
      "linear_q",
      [](Address x, int64_t x_stride, Address weight, Address bias, Address out, int64_t out_stride,
         int64_t rows, int64_t n, int64_t k, int64_t group, int format, int dtype, int out_dtype) {
        kernels().linear_q({at<void>(x), x_stride, at<void>(weight), at<void>(bias), at<void>(out),
                            out_stride, rows, n, k, group, static_cast<QuantFormat>(format),
                            dtype_of(dtype), dtype_of(out_dtype)});
      },
      Release());

  m.def(
      "rms_norm",
      [](Address x, int64_t x_stride, int64_t x_head_stride, Address residual, Address residual_out,
         Address weight, Address out, int64_t out_stride, int64_t out_head_stride, int64_t rows,
         int64_t heads, int64_t dim, float eps, float weight_offset, int dtype) {
        kernels().rms_norm({at<void>(x), x_stride, x_head_stride, at<void>(residual),
                            at<void>(residual_out), at<void>(weight), nullptr, at<void>(out),
                            out_stride, out_head_stride, rows, heads, dim, eps, weight_offset,
                            dtype_of(dtype)});
      },
      Release());

  m.def(
      "layer_norm",
      [](Address x, int64_t x_stride, Address weight, Address bias, Address out, int64_t rows,
         int64_t dim, float eps, int dtype) {
        kernels().layer_norm({at<void>(x), x_stride, 0, nullptr, nullptr, at<void>(weight),
                              at<void>(bias), at<void>(out), dim, 0, rows, 1, dim, eps, 0.0f,
                              dtype_of(dtype)});
      },
      Release());

  m.def(
      "gated",
      [](int kind, Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim, int dtype) {
        kernels().gated({at<void>(x), x_stride, at<void>(out), rows, dim, static_cast<Gated>(kind),
                         dtype_of(dtype)});
      },
      Release());

  m.def(
      "unary",
      [](int kind, Address x, Address out, int64_t count, float param, int dtype) {
        kernels().unary({at<void>(x), at<void>(out), count, param, static_cast<Unary>(kind),
                         dtype_of(dtype)});
      },
      Release());

  m.def(
      "rotary",
      [](Address positions, Address query, int64_t query_stride, int64_t query_head_stride,
         int64_t query_heads, Address key, int64_t key_stride, int64_t key_head_stride,
         int64_t key_heads, Address cos_sin, int64_t tokens, int64_t rotary_dim, bool is_neox,
         int dtype) {
        kernels().rotary({at<int64_t>(positions), at<void>(query), query_stride, query_head_stride,
                          query_heads, at<void>(key), key_stride, key_head_stride, key_heads,
                          at<float>(cos_sin), tokens, rotary_dim, is_neox, dtype_of(dtype)});
      },
      Release());

  m.def(
      "softmax",
      [](Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim, bool log) {
        kernels().softmax({at<float>(x), x_stride, at<float>(out), rows, dim, log});
      },
      Release());

  m.def(
      "argmax",
      [](Address x, int64_t x_stride, Address out, int64_t rows, int64_t dim) {
        kernels().argmax({at<float>(x), x_stride, at<int64_t>(out), rows, dim});
      },
      Release());

  m.def(
      "top_k",
      [](Address x, int64_t x_stride, int64_t rows, int64_t dim, int64_t k, Address values,
         Address indices) {
        top_k(at<float>(x), x_stride, rows, dim, k, at<float>(values), at<int64_t>(indices));
      },
      Release());

  m.def(
      "write_kv",
      [](Address key, int64_t key_stride, int64_t key_head_stride, Address value,
         int64_t value_stride, int64_t value_head_stride, Address kv_cache, Address slot_mapping,
         int64_t tokens, int64_t kv_heads, int64_t head_size, int64_t block_size, int dtype) {
        kernels().write_kv({at<void>(key), key_stride, key_head_stride, at<void>(value),
                            value_stride, value_head_stride, at<void>(kv_cache),
                            at<int64_t>(slot_mapping), tokens, kv_heads, head_size, block_size,
                            dtype_of(dtype)});
      },
      Release());

  m.def(
      "attention",
      [](Address query, int64_t query_stride, int64_t query_head_stride, Address out,
         int64_t out_stride, int64_t out_head_stride, Address kv_cache, Address query_start_loc,
         Address seq_lens, Address block_table, int64_t block_table_stride, int64_t num_reqs,
         int64_t heads, int64_t kv_heads, int64_t head_size, int64_t block_size, int64_t window,
         float scale, float soft_cap, Address alibi_slopes, int dtype) {
        kernels().attention({at<void>(query), query_stride, query_head_stride, at<void>(out),
                             out_stride, out_head_stride, at<void>(kv_cache),
                             at<int32_t>(query_start_loc), at<int32_t>(seq_lens),
                             at<int32_t>(block_table), block_table_stride, num_reqs, heads,
                             kv_heads, head_size, block_size, window, scale, soft_cap,
                             at<float>(alibi_slopes), dtype_of(dtype)});
      },
      Release());
}
