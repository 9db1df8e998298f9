// A view of numbers in memory: an address, a type, a shape and strides.
//
// Views are cheap, and there is no arithmetic: kernels compute, and so does numpy, on `numpy()`.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace octavo {

struct TensorType {
  const char* name;
  uint8_t code, bits;  // of DLPack: https://dmlc.github.io/dlpack/latest/c_api.html
  int64_t itemsize() const { return bits / 8; }
};

// DLPack's codes: 0 signed, 1 unsigned, 2 float, 4 bfloat, 6 bool; 10 and 12 are the 8-bit floats.
constexpr std::array<TensorType, 15> kTensorTypes = {{
    {"float32", 2, 32}, {"bfloat16", 4, 16}, {"float16", 2, 16}, {"float64", 2, 64},
    {"uint8", 1, 8},    {"int8", 0, 8},      {"int16", 0, 16},   {"int32", 0, 32},
    {"int64", 0, 64},   {"uint16", 1, 16},   {"uint32", 1, 32},  {"uint64", 1, 64},
    {"bool", 6, 8},     {"float8_e4m3fn", 10, 8}, {"float8_e5m2", 12, 8},
}};

constexpr int kMaxDims = 8;

struct Tensor {
  char* data = nullptr;
  const TensorType* type = nullptr;
  int dims = 0;
  std::array<int64_t, kMaxDims> shape{}, strides{};  // strides in elements

  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < dims; i++) count *= shape[i];
    return count;
  }
  int64_t nbytes() const { return numel() * type->itemsize(); }

  // Sizes come from callers: their product must be a number of bytes.
  void check_size() const {
    int64_t nbytes = type->itemsize();
    for (int i = 0; i < dims; i++)
      if (__builtin_mul_overflow(nbytes, shape[i] > 0 ? shape[i] : 1, &nbytes))
        throw std::invalid_argument("the sizes of the tensor are too large");
  }

  void add_dim(int64_t size, int64_t stride) {
    if (dims == kMaxDims) throw std::invalid_argument("a tensor has at most 8 dimensions");
    shape[dims] = size;
    strides[dims++] = stride;
  }

  bool is_contiguous() const {
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; i--) {
      if (shape[i] == 0) return true;
      if (shape[i] != 1 && strides[i] != stride) return false;
      stride *= shape[i];
    }
    return true;
  }

  int dim(int64_t index) const {
    if (index < -dims || index >= dims)
      throw std::out_of_range("dimension " + std::to_string(index) + " of a tensor with " +
                              std::to_string(dims));
    return int(index < 0 ? index + dims : index);
  }

  // Elements begin, begin + step, ... of a dimension.
  Tensor cut(int dim, int64_t begin, int64_t step, int64_t count) const {
    Tensor part = *this;
    if (count > 0) part.data += begin * strides[dim] * type->itemsize();
    part.shape[dim] = count;
    part.strides[dim] *= step;
    return part;
  }

  // The same elements in another shape; one size may be -1.
  Tensor view(std::span<const int64_t> sizes) const {
    Tensor result{data, type};
    const int64_t count = numel();
    int64_t known = 1;  // product of the given sizes
    int open = -1;
    for (size_t i = 0; i < sizes.size(); i++) {
      if (sizes[i] == -1 && open < 0)
        open = int(i);
      else if (sizes[i] < 0)
        throw std::invalid_argument("sizes are not negative, and only one may be -1");
      else if (__builtin_mul_overflow(known, sizes[i], &known))
        throw std::invalid_argument("the sizes of the view are too large");
      result.add_dim(sizes[i], 0);
    }
    if (open >= 0) result.shape[open] = known > 0 ? count / known : 0;
    if (result.numel() != count || (open >= 0 && known == 0))
      throw std::invalid_argument("a view has the same number of elements");
    if (count == 0) {
      result.set_dense();
      return result;
    }
    // Dimensions that lie densely in one another form a run. Each run is divided separately.
    int to = result.dims - 1;
    for (int last = dims - 1; last >= 0;) {
      int first = last;
      int64_t run = shape[last];
      while (first > 0 &&
             (shape[first - 1] == 1 || run == 1 || strides[first - 1] == run * inner_stride(first, last)))
        run *= shape[--first];
      int64_t stride = inner_stride(first, last), done = 1;
      while (to >= 0 && done < run) {
        result.strides[to] = stride * done;
        done *= result.shape[to--];
      }
      if (done != run)
        throw std::invalid_argument("the strides do not allow this view without a copy");
      last = first - 1;
    }
    for (; to >= 0; to--)  // sizes of 1
      result.strides[to] = to + 1 < result.dims ? result.shape[to + 1] * result.strides[to + 1] : 1;
    return result;
  }

  // The same bytes as another type; the last dimension is dense.
  Tensor view(const TensorType& as) const {
    Tensor result = *this;
    result.type = &as;
    const int64_t from = type->itemsize(), to = as.itemsize();
    if (from == to) return result;
    if (dims == 0) throw std::invalid_argument("a single number keeps its size");
    const int last = dims - 1;
    if (strides[last] != 1 && shape[last] != 1)
      throw std::invalid_argument("a view as another type needs a dense last dimension");
    if (shape[last] * from % to != 0)
      throw std::invalid_argument("the last dimension is not a whole number of elements");
    result.shape[last] = shape[last] * from / to;
    result.strides[last] = 1;
    for (int i = 0; i < last; i++) {
      if (shape[i] > 1 && strides[i] * from % to != 0)
        throw std::invalid_argument("the strides are not whole numbers of elements");
      result.strides[i] = strides[i] * from / to;
    }
    return result;
  }

  void set_dense() {
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; i--) {
      strides[i] = stride;
      stride *= shape[i] > 0 ? shape[i] : 1;
    }
  }

 private:
  // Stride of the innermost dimension of a run that has more than one element.
  int64_t inner_stride(int first, int last) const {
    for (int i = last; i >= first; i--)
      if (shape[i] != 1) return strides[i];
    return strides[last];
  }
};

inline const TensorType& tensor_type(std::string_view name) {
  for (const TensorType& type : kTensorTypes)
    if (name == type.name) return type;
  throw std::invalid_argument("there is no tensor type " + std::string(name));
}

inline const TensorType& tensor_type(uint8_t code, uint8_t bits) {
  for (const TensorType& type : kTensorTypes)
    if (code == type.code && bits == type.bits) return type;
  throw std::invalid_argument("no tensor type has DLPack's code " + std::to_string(code) + " with " +
                              std::to_string(bits) + " bits");
}

}  // namespace octavo
