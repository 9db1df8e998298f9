// One variant: compiled once for each instruction set, with OCTAVO_ISA as its name. With
// OCTAVO_BYTES_ONLY it has products of bytes only, and takes all else from another one (dispatch.cpp).
#include "quant.h"
#if !defined(OCTAVO_BYTES_ONLY)
#include "activation.h"
#include "attention.h"
#include "gemm.h"
#include "norm.h"
#include "rotary.h"
#include "sample.h"
#endif

#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)

namespace octavo {
namespace OCTAVO_ISA {

#if defined(OCTAVO_BYTES_ONLY)
extern void (*const byte_product)(const LinearQArgs&);
void (*const byte_product)(const LinearQArgs&) = linear_q;
#else
extern const KernelTable table;
const KernelTable table = {
    OCTAVO_NAME(OCTAVO_ISA), kPanel, pack_weight, linear, quantize_weight, pack_quant, linear_q,
    rms_norm, layer_norm, gated, unary, rotary, softmax, argmax, row_max,
    sample, gather, add, write_kv, attention};
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
