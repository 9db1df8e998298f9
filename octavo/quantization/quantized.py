"""Forms that quantize weights of floats while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from octavo.quantization.base import PackedShape, Part
from octavo.quantization.packed import Packed
from octavo.quantization.plain import FromFloats, floats

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import OnlineFormat, QuantizedWeight
    from octavo.system.tensor import HostTensor


class FromFloatsQuantized(Packed, FromFloats):
    """`WeightForm` with a format that depends only on the weight's shape."""

    max_inputs: ClassVar[int | None] = 2**17
    """Limit of 32-bit sums of products."""

    def format(self, n: int, k: int) -> tuple[OnlineFormat, int]:
        """Return the format of a weight [n, k] and the number of inputs that share a scale."""
        raise NotImplementedError

    def kernel_format(self, shape: PackedShape) -> tuple[OnlineFormat, int]:
        """Implement `Packed`."""
        return self.format(shape.whole or shape.n, shape.k)

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        return ops.quantize_weight(floats(parts, "float32"), *self.kernel_format(shape), out)
