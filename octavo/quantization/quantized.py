"""Forms that quantize weights of floats while they are loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import Part
from octavo.quantization.plain import FromFloats, floats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight


class FromFloatsQuantized(FromFloats):
    """A `WeightForm` whose format depends on a weight's shape only."""

    max_inputs: ClassVar[int | None] = 2**17
    """Sums of 32 bits hold no more products."""

    def format(self, n: int, k: int) -> tuple[Literal["int8", "int4_levels"], int]:
        """Return the format of a weight [n, k] and the number of inputs that share a scale."""
        raise NotImplementedError

    def nbytes(self, n: int, k: int, dtype: str, whole: int | None = None) -> int:
        """See `WeightForm`."""
        return quantized_nbytes(n, k, *self.format(whole or n, k))

    def pack(
        self,
        ops: Ops,
        parts: Sequence[Part],
        dtype: torch.dtype,
        out: Tensor | None = None,
        whole: int | None = None,
    ) -> QuantizedWeight:
        """See `WeightForm`."""
        import torch

        tensors = floats(parts, torch.float32)
        n, k = sum(len(tensor) for tensor in tensors), tensors[0].shape[1]
        return ops.quantize_weight(tensors, *self.format(whole or n, k), out)

    def wrap(
        self,
        data: Tensor,
        n: int,
        k: int,
        dtype: torch.dtype,
        panel: int,
        whole: int | None = None,
    ) -> QuantizedWeight:
        """See `WeightForm`."""
        from octavo.kernels.base import QuantizedWeight

        return QuantizedWeight(data, n, k, *self.format(whole or n, k), panel)
