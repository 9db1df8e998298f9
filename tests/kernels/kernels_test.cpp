// Every kernel of every variant that this processor has, against plain C++, and bit for bit against
// itself in other company. A test without Python, for processors that are only emulated:
//   cmake -S . -B build/kernels_test -DOCTAVO_KERNELS_TEST=ON -DCMAKE_BUILD_TYPE=Release
//   cmake --build build/kernels_test && build/kernels_test/kernels_test
// Prints the variants, best first, on one line, then what is wrong; ends with 1 if anything is. With the
// name of a variant it tests that one only.
#include "cpp/attention_test.h"
#include "cpp/linear_test.h"
#include "cpp/lora_test.h"
#include "cpp/quant_test.h"
#include "cpp/rows_test.h"
#include "cpp/sampling_test.h"

int main(int argc, char** argv) {
  for (const std::string& isa : available_isas()) std::printf("%s ", isa.c_str());
  std::printf("\n");
  set_num_threads(2);
  for (const std::string& isa : available_isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    generator.seed(1);
    if (!set_isa(isa)) std::abort();
    test_linears();
    test_conversions<bf16>();
    test_conversions<f16>();
    test_quantized();
    test_quantize_weight();
    test_norms();
    test_elementwise();
    test_rotary();
    test_softmax();
    test_sample();
    test_attention();
    test_lora();
    test_top_k();
    test_bitmask();
    test_fp8();
  }
  if (failures) std::printf("%d failures\n", failures);
  return failures > 0;
}
