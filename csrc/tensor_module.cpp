#include "tensor_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tensor.h"

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr size_t kAlignment = 64;  // a cache line

// Structures of DLPack's version 0: https://dmlc.github.io/dlpack/latest/c_api.html
struct DLDevice {
  int32_t type, id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
constexpr int32_t kHost = 1;
constexpr const char* kUnused = "dltensor";
constexpr const char* kUsed = "used_dltensor";

// numpy's array interface: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two, nd;
  char kind;
  int itemsize, flags;
  Py_ssize_t *shape, *strides;
  void* data;
  PyObject* descr;
};
enum : int { kAligned = 0x100, kNativeOrder = 0x200, kWritable = 0x400 };

struct Held : Tensor {
  nb::object owner;  // keeps the memory
  bool writable = true;

  Held() = default;
  Held(const Tensor& tensor, const Held& from)
      : Tensor(tensor), owner(from.owner), writable(from.writable) {}
};

nb::object dtype_of(const Held& t) {
  static PyObject* names[kTensorTypes.size()];
  PyObject*& name = names[t.type - kTensorTypes.data()];
  if (!name) name = PyUnicode_InternFromString(t.type->name);
  return nb::borrow(name);
}

nb::tuple to_tuple(const std::array<int64_t, kMaxDims>& numbers, int count) {
  nb::object tuple = nb::steal(PyTuple_New(count));
  for (int i = 0; i < count; i++) PyTuple_SetItem(tuple.ptr(), i, PyLong_FromLongLong(numbers[i]));
  return nb::borrow<nb::tuple>(tuple);
}

int64_t to_int(PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// Sizes as arguments, or as one sequence.
std::vector<int64_t> to_sizes(const nb::args& args) {
  nb::object all = args;
  if (args.size() == 1 && !PyIndex_Check(args[0].ptr())) all = nb::borrow(args[0]);
  std::vector<int64_t> sizes;
  for (nb::handle size : all) {
    nb::object number = nb::steal(PyNumber_Index(size.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    sizes.push_back(to_int(number.ptr()));
  }
  return sizes;
}

// Applies one part of an index to dimension `dim` of `t`; returns the next dimension.
int apply_index(Tensor& t, int dim, PyObject* index) {
  if (dim >= t.dims) throw nb::index_error("too many indices for the tensor's dimensions");
  const int64_t size = t.shape[dim];
  if (PySlice_Check(index)) {
    Py_ssize_t begin, end, step;
    if (PySlice_Unpack(index, &begin, &end, &step) < 0) throw nb::python_error();
    const Py_ssize_t count = PySlice_AdjustIndices(size, &begin, &end, step);
    t = t.cut(dim, begin, step, count);
    return dim + 1;
  }
  if (PyBool_Check(index) || !PyIndex_Check(index))
    throw nb::type_error("tensors are indexed by integers, slices, None and ...; anything else copies");
  nb::object number = nb::steal(PyNumber_Index(index));
  if (!number.is_valid()) throw nb::python_error();
  int64_t at = to_int(number.ptr());
  if (at < 0) at += size;
  if (at < 0 || at >= size) throw nb::index_error("index out of the tensor's range");
  t = t.cut(dim, at, 1, 1);
  for (int i = dim; i + 1 < t.dims; i++) {
    t.shape[i] = t.shape[i + 1];
    t.strides[i] = t.strides[i + 1];
  }
  t.dims--;
  return dim;
}

Held get_item(const Held& self, nb::handle index) {
  Tensor t = self;
  if (!PyTuple_Check(index.ptr())) {
    if (index.ptr() != Py_Ellipsis && index.ptr() != Py_None) {
      apply_index(t, 0, index.ptr());
      return {t, self};
    }
  }
  nb::tuple parts = PyTuple_Check(index.ptr()) ? nb::borrow<nb::tuple>(index) : nb::make_tuple(index);
  int used = 0, ellipses = 0;
  for (nb::handle part : parts) {
    used += part.ptr() != Py_Ellipsis && part.ptr() != Py_None;
    ellipses += part.ptr() == Py_Ellipsis;
  }
  if (ellipses > 1) throw nb::index_error("an index has at most one ...");
  int dim = 0;
  for (nb::handle part : parts) {
    if (part.ptr() == Py_Ellipsis) {
      dim += std::max(0, self.dims - used);
    } else if (part.ptr() == Py_None) {
      Tensor wider = t;
      wider.add_dim(1, 1);
      for (int i = t.dims; i > dim; i--) {
        wider.shape[i] = t.shape[i - 1];
        wider.strides[i] = t.strides[i - 1];
      }
      wider.shape[dim] = wider.strides[dim] = 1;
      t = wider;
      dim++;
    } else {
      dim = apply_index(t, dim, part.ptr());
    }
  }
  return {t, self};
}

Held allocate(const nb::args& args, const std::string& dtype, bool zeros) {
  Held t;
  t.type = &tensor_type(dtype);
  for (int64_t size : to_sizes(args)) {
    if (size < 0) throw nb::value_error("sizes are not negative");
    t.add_dim(size, 0);
  }
  t.check_size();
  t.set_dense();
  const size_t nbytes = size_t(t.nbytes()), rounded = (nbytes + kAlignment) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (!memory) throw std::bad_alloc();
  if (zeros) std::memset(memory, 0, nbytes);
  t.data = static_cast<char*>(memory);
  t.owner = nb::capsule(memory, [](void* p) noexcept { std::free(p); });
  return t;
}

const TensorType& numpy_type(char kind, int itemsize, nb::handle array) {
  constexpr struct {
    char kind;
    uint8_t code;
  } kKinds[] = {{'f', 2}, {'i', 0}, {'u', 1}, {'b', 6}};
  const bool is_float8 = kind == 'f' && itemsize == 1;
  for (const auto& it : kKinds)
    if (it.kind == kind && !is_float8) return tensor_type(it.code, uint8_t(8 * itemsize));
  return tensor_type(nb::cast<std::string>(array.attr("dtype").attr("name")));
}

Held from_numpy(nb::object array) {
  nb::object capsule = array.attr("__array_struct__");
  const auto* it = static_cast<ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!it) throw nb::python_error();
  Held t;
  t.type = &numpy_type(it->kind, it->itemsize, array);
  t.data = static_cast<char*>(it->data);
  for (int i = 0; i < it->nd; i++) {
    if (it->shape[i] > 1 && it->strides[i] % it->itemsize != 0)
      throw nb::value_error("the array's strides are not whole numbers of elements");
    t.add_dim(it->shape[i], it->strides[i] / it->itemsize);
  }
  if (t.numel() == 0) t.set_dense();
  t.writable = it->flags & kWritable;
  t.owner = std::move(array);
  return t;
}

struct ExportedArray {
  ArrayInterface interface;
  std::array<Py_ssize_t, kMaxDims> shape, strides;
};

nb::object array_struct(const Held& t) {
  auto out = std::make_unique<ExportedArray>();
  const uint8_t code = t.type->code;
  const char kind = code == 0 ? 'i' : code == 1 ? 'u' : code == 2 ? 'f' : code == 6 ? 'b' : 'V';
  const int itemsize = int(t.type->itemsize());
  for (int i = 0; i < t.dims; i++) {
    out->shape[i] = t.shape[i];
    out->strides[i] = t.strides[i] * itemsize;
  }
  const bool aligned = reinterpret_cast<uintptr_t>(t.data) % itemsize == 0;
  const int flags = kNativeOrder | (aligned ? kAligned : 0) | (t.writable ? kWritable : 0);
  out->interface = {2, t.dims, kind, itemsize, flags,
                    out->shape.data(), out->strides.data(), t.data, nullptr};
  nb::object capsule = nb::steal(PyCapsule_New(out.get(), nullptr, [](PyObject* it) {
    delete static_cast<ExportedArray*>(PyCapsule_GetPointer(it, nullptr));
  }));
  if (!capsule.is_valid()) throw nb::python_error();
  out.release();
  return capsule;
}

// Objects of other modules that are needed often; they are never freed.
nb::handle numpy_asarray() {
  static const nb::handle function =
      nb::object(nb::module_::import_("numpy").attr("asarray")).release();
  return function;
}

nb::handle numpy_dtype(const TensorType& type) {
  static nb::handle dtypes[kTensorTypes.size()];
  nb::handle& dtype = dtypes[&type - kTensorTypes.data()];
  if (!dtype.is_valid()) dtype = nb::object(nb::module_::import_("ml_dtypes").attr(type.name)).release();
  return dtype;
}

struct ExportedTensor {
  DLManagedTensor managed;
  Held tensor;
};

nb::object to_dlpack(const Held& t) {
  for (int i = 0; i < t.dims; i++)
    if (t.strides[i] < 0) throw nb::buffer_error("torch aborts at negative strides; make a copy");
  auto out = std::make_unique<ExportedTensor>();
  out->tensor = t;
  out->managed.tensor = {t.data,
                         {kHost, 0},
                         t.dims,
                         {t.type->code, t.type->bits, 1},
                         out->tensor.shape.data(),
                         out->tensor.strides.data(),
                         0};
  out->managed.context = out.get();
  out->managed.deleter = [](DLManagedTensor* managed) {
    nb::gil_scoped_acquire lock;
    delete static_cast<ExportedTensor*>(managed->context);
  };
  nb::object capsule = nb::steal(PyCapsule_New(&out->managed, kUnused, [](PyObject* it) {
    if (!PyCapsule_IsValid(it, kUnused)) return;  // its user deletes it
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(it, kUnused));
    managed->deleter(managed);
  }));
  if (!capsule.is_valid()) throw nb::python_error();
  out.release();
  return capsule;
}

Held from_dlpack(nb::object from) {
  nb::object capsule = from.attr("__dlpack__")();
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kUnused));
  if (!managed) throw nb::python_error();
  const DLTensor& it = managed->tensor;
  if (it.device.type != kHost) throw nb::value_error("the tensor is not in the host's memory");
  if (it.dtype.lanes != 1) throw nb::value_error("vectors of numbers are not supported");
  Held t;
  t.type = &tensor_type(it.dtype.code, it.dtype.bits);
  t.data = static_cast<char*>(it.data) + it.byte_offset;
  for (int i = 0; i < it.ndim; i++) t.add_dim(it.shape[i], it.strides ? it.strides[i] : 0);
  if (!it.strides) t.set_dense();
  t.owner = nb::capsule(managed, [](void* p) noexcept {
    auto* used = static_cast<DLManagedTensor*>(p);
    if (used->deleter) used->deleter(used);
  });
  PyCapsule_SetName(capsule.ptr(), kUsed);
  return t;
}

std::vector<Held> split(const Held& t, const std::vector<int64_t>& sizes, int64_t index) {
  const int dim = t.dim(index);
  std::vector<Held> parts;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    if (size < 0 || begin + size > t.shape[dim]) throw nb::value_error("the sizes exceed the dimension");
    parts.emplace_back(t.cut(dim, begin, 1, size), t);
    begin += size;
  }
  if (begin != t.shape[dim]) throw nb::value_error("the sizes do not fill the dimension");
  return parts;
}

Held transpose(const Held& t, int64_t first, int64_t second) {
  Held result = t;
  const int a = t.dim(first), b = t.dim(second);
  std::swap(result.shape[a], result.shape[b]);
  std::swap(result.strides[a], result.strides[b]);
  return result;
}

}  // namespace

void def_tensor(nb::module_& m, void (*check_readable)()) {
  nb::class_<Held>(m, "Tensor")
      .def_prop_ro("dtype", &dtype_of)
      .def_prop_ro("shape", [](const Held& t) { return to_tuple(t.shape, t.dims); })
      .def_prop_ro("ndim", [](const Held& t) { return t.dims; })
      .def_prop_ro("itemsize", [](const Held& t) { return t.type->itemsize(); })
      .def_prop_ro("nbytes", [](const Held& t) { return t.nbytes(); })
      .def_prop_ro("T", [](const Held& t) { return transpose(t, 0, 1); })
      .def("dim", [](const Held& t) { return t.dims; })
      .def("numel", [](const Held& t) { return t.numel(); })
      .def("size", [](const Held& t, int64_t dim) { return t.shape[t.dim(dim)]; }, nb::arg("dim"))
      .def("stride", [](const Held& t) { return to_tuple(t.strides, t.dims); })
      .def("stride", [](const Held& t, int64_t dim) { return t.strides[t.dim(dim)]; }, nb::arg("dim"))
      .def("data_ptr", [](const Held& t) { return reinterpret_cast<uintptr_t>(t.data); })
      .def("is_contiguous", [](const Held& t) { return t.is_contiguous(); })
      .def("__len__",
           [](const Held& t) {
             if (t.dims == 0) throw nb::type_error("a single number has no length");
             return t.shape[0];
           })
      .def("__getitem__", &get_item)
      .def("view",
           [](const Held& t, nb::args args) {
             if (args.size() == 1 && PyUnicode_Check(args[0].ptr()))
               return Held(t.view(tensor_type(nb::cast<std::string>(args[0]))), t);
             return Held(t.view(to_sizes(args)), t);
           })
      .def("split_with_sizes", &split, nb::arg("sizes"), nb::arg("dim") = 0)
      .def("unbind",
           [](const Held& t, int64_t index) {
             const int dim = t.dim(index);
             std::vector<Held> parts;
             for (int64_t i = 0; i < t.shape[dim]; i++) {
               Tensor part = t.cut(dim, i, 1, 1);
               for (int d = dim; d + 1 < part.dims; d++) {
                 part.shape[d] = part.shape[d + 1];
                 part.strides[d] = part.strides[d + 1];
               }
               part.dims--;
               parts.emplace_back(part, t);
             }
             return parts;
           },
           nb::arg("dim") = 0)
      .def("transpose", &transpose, nb::arg("dim0"), nb::arg("dim1"))
      .def_prop_ro("__array_struct__", &array_struct)
      .def("numpy",
           [=](nb::handle self) {
             check_readable();
             nb::object array = numpy_asarray()(self);
             const TensorType& type = *nb::inst_ptr<Held>(self)->type;
             const bool known = type.code <= 2 || type.code == 6;
             return known ? array : array.attr("view")(numpy_dtype(type));
           })
      .def("__dlpack__", [](const Held& t, nb::kwargs) { return to_dlpack(t); })
      .def("__dlpack_device__", [](const Held&) { return nb::make_tuple(kHost, 0); })
      .def("__repr__", [](const Held& t) {
        std::string sizes;
        for (int i = 0; i < t.dims; i++) sizes += (i ? ", " : "") + std::to_string(t.shape[i]);
        return "Tensor(" + std::string(t.type->name) + " [" + sizes + "])";
      });
  m.def("empty", [](nb::args sizes, const std::string& dtype) { return allocate(sizes, dtype, false); },
        nb::arg("sizes"), nb::kw_only(), nb::arg("dtype"));
  m.def("zeros", [](nb::args sizes, const std::string& dtype) { return allocate(sizes, dtype, true); },
        nb::arg("sizes"), nb::kw_only(), nb::arg("dtype"));
  m.def("itemsize", [](const std::string& dtype) { return tensor_type(dtype).itemsize(); });
  m.def("from_numpy", &from_numpy);
  m.def("from_dlpack", &from_dlpack);
}

}  // namespace octavo
