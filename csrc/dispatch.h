// Choice of the kernels' variant.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// The chosen variant: initially the one that the environment variable OCTAVO_ISA names, or else the
// best for this processor. Throws std::invalid_argument if the processor lacks the named variant.
const KernelTable& kernels();
// Best first. The first call requests the permissions that variants need from the system.
std::vector<std::string> available_isas();
bool set_isa(const std::string& name);  // false: not available here

}  // namespace octavo
