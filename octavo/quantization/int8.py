"""int8: one scale for each output, symmetric; activations by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight


class Int8:
    """Weights and activations of 8 bits; see `Quantization`."""

    name = "int8"

    def nbytes(self, n: int, k: int) -> int:
        """A byte a number."""
        return quantized_nbytes(n, k, "int8", 0)

    def pack(self, ops: Ops, parts: Sequence[Tensor]) -> QuantizedWeight:
        """The largest number of each output becomes 127."""
        return quantize(ops, parts, "int8", 0)
