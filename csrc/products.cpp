// Products with quantized weights of one variant. They are compiled apart from its other kernels
// (kernels.cpp): at the same time, and alone for variants that differ in nothing else.
#define OCTAVO_PRODUCTS
#include "quant.h"

namespace octavo {
namespace OCTAVO_ISA {

void linear_q(const LinearQArgs& a) { quantized_product(a); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
