"""FP8 encoding of the KV cache by integer arithmetic: the same bits on every GPU, and on a CPU.

Formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3, E5M2 = 1, 2
"""Values of FORMAT; 0 means a cache of the model's dtype."""


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """Convert float32 to uint8: round to nearest even, clamp to finite numbers, keep NaN."""
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    LARGEST: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), LARGEST)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    # Convert to units in the last place, an exact multiplication by a power of two. Adding 1.5
    # * 2^23, above which float32 has only whole numbers, then rounds to a whole number.
    unit = ((MANTISSA + 127) - exponent) << 23
    whole = (size * unit.to(tl.float32, bitcast=True) + 12582912.0) - 12582912.0
    code = ((exponent + BIAS) << MANTISSA) + whole.to(tl.int32) - (1 << MANTISSA)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """Convert uint8 to float16, which has every number of both formats."""
    wide = code.to(tl.uint16)
    if FORMAT == 1:
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        x = bits.to(tl.float16, bitcast=True) * 256.0  # 2^(15 - 7): the difference of the biases
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), x)
    else:
        x = (wide << 8).to(tl.float16, bitcast=True)
    return x
