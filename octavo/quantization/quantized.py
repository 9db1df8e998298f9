"""Forms that quantize weights of floats while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import PackedShape, Part
from octavo.quantization.plain import FromFloats, floats

if TYPE_CHECKING:
    from octavo.kernels.base import OnlineFormat, Ops, QuantizedWeight
    from octavo.system.tensor import HostTensor


class FromFloatsQuantized(FromFloats):
    """`WeightForm` with a format that depends only on the weight's shape."""

    max_inputs: ClassVar[int | None] = 2**17
    """Limit of 32-bit sums of products."""

    def format(self, n: int, k: int) -> tuple[OnlineFormat, int]:
        """Return the format of a weight [n, k] and the number of inputs that share a scale."""
        raise NotImplementedError

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return quantized_nbytes(shape.n, shape.k, *self._format(shape))

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        return ops.quantize_weight(floats(parts, "float32"), *self._format(shape), out)

    def wrap(self, data: HostTensor, shape: PackedShape) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo import _native
        from octavo.kernels.base import QuantizedWeight

        return QuantizedWeight(data, shape.n, shape.k, *self._format(shape), _native.panel())

    def _format(self, shape: PackedShape) -> tuple[OnlineFormat, int]:
        return self.format(shape.whole or shape.n, shape.k)
