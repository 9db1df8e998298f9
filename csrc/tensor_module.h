// The Python class of tensors.
#pragma once
#include <nanobind/nanobind.h>

namespace octavo {
// Adds the class `Tensor` and the functions that create tensors to a module. `check_readable` is
// called before a caller sees the numbers; it may throw.
void def_tensor(nanobind::module_& m, void (*check_readable)());
}  // namespace octavo
