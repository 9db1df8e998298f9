"""int4: one scale for each output and 32 inputs, symmetric; activations of 8 bits, likewise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight

GROUP_SIZE = 32


class Int4:
    """Weights of 4.5 bits, scales included; see `Quantization`."""

    name = "int4"

    def nbytes(self, weight: str, n: int, k: int) -> int:
        """As in `pack`."""
        return quantized_nbytes(n, k, *_format(weight))

    def pack(self, ops: Ops, weight: str, parts: Sequence[Tensor]) -> QuantizedWeight:
        """Each scale is the one with the smallest squared error of those tried."""
        return quantize(ops, parts, *_format(weight))


def _format(weight: str) -> tuple:
    """Bits and group size."""
    import os
    if weight == "lm_head.weight" and os.environ.get("HEAD8"):
        return "int8", 0
    return "int4_levels", int(os.environ.get("GROUP", GROUP_SIZE))
