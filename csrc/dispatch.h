// Which variant of the kernels runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

const KernelTable& kernels();  // the chosen variant: at first the best that this processor has
std::vector<std::string> available_isas();  // best first
bool set_isa(const std::string& name);  // false: not available here

}  // namespace octavo
