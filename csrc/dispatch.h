// Which variant of the kernels runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// The chosen variant: at first the one that the environment's OCTAVO_ISA names, or else the best that
// this processor has. Throws std::invalid_argument if it has not what OCTAVO_ISA names.
const KernelTable& kernels();
// Best first. The first call asks the system for what needs its permission.
std::vector<std::string> available_isas();
bool set_isa(const std::string& name);  // false: not available here

}  // namespace octavo
