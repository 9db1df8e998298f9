// One variant: compiled once for each instruction set, with OCTAVO_ISA as its name.
#include "activation.h"
#include "attention.h"
#include "gemm.h"
#include "norm.h"
#include "quant.h"
#include "rotary.h"
#include "sample.h"

#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)

namespace octavo {
namespace OCTAVO_ISA {

extern const KernelTable table;
const KernelTable table = {
    OCTAVO_NAME(OCTAVO_ISA), kPanel, pack_weight, linear, quantize_weight, pack_quant, linear_q,
    rms_norm, layer_norm, gated, unary, rotary, softmax, argmax, row_max,
    sample, gather, add, write_kv, attention};

}  // namespace OCTAVO_ISA
}  // namespace octavo
