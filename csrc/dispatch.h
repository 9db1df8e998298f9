// Which variant of the kernels runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

const KernelTable& kernels();  // the chosen variant: at first the best that this processor has
std::vector<std::string> available_isas();  // best first
bool set_isa(const std::string& name);  // false: not available here
void set_num_threads(int n);  // 0: what OpenMP says, which torch.set_num_threads sets

}  // namespace octavo
