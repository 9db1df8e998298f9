"""int8: one scale for each output, symmetric; 8-bit activations, one scale for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.kernels.sizes import quantized_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight


class Int8:
    """Format with 8 bits for each weight; see `Quantization`."""

    name = "int8"

    def nbytes(self, n: int, k: int, whole: int | None = None) -> int:
        """Return one byte for each weight, plus the scales."""
        return quantized_nbytes(n, k, "int8", 0)

    def wrap(
        self, data: Tensor, n: int, k: int, panel: int, whole: int | None = None
    ) -> QuantizedWeight:
        """Wrap the bytes of a weight that `pack` made."""
        from octavo.kernels.base import QuantizedWeight

        return QuantizedWeight(data, n, k, "int8", 0, panel)

    def pack(
        self,
        ops: Ops,
        parts: Sequence[Tensor],
        out: Tensor | None = None,
        whole: int | None = None,
    ) -> QuantizedWeight:
        """Quantize with scales that make the largest magnitude of each output 127."""
        return ops.quantize_weight(parts, "int8", 0, out)
