"""Common parts of forms whose packed weights are quantized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import PackedShape, Part

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import QuantFormat, QuantizedWeight
    from octavo.system.tensor import HostTensor


class Packed(ABC):
    """Size of a packed weight, and its wrapping."""

    ordered: bool = False
    """True if packed weights have an order of their inputs."""

    @abstractmethod
    def kernel_format(self, shape: PackedShape) -> tuple[QuantFormat, int]:
        """Return the format of a packed weight, and its group size: see `QuantizedWeight`."""

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        format = self.kernel_format(shape)
        return quantized_nbytes(shape.n, shape.k, *format, ordered=self.ordered)

    def wrap(self, data: HostTensor, shape: PackedShape) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo import _native
        from octavo.kernels.native import order_of
        from octavo.kernels.weights import QuantizedWeight

        order = order_of(data, shape.k) if self.ordered else None
        format = self.kernel_format(shape)
        return QuantizedWeight(data, shape.n, shape.k, *format, _native.panel(), order)


class PackedCodes(Packed):
    """`Packed` with parts of codes and scales."""

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo.kernels.weights import Codes

        codes = (Codes(*map(ops.to_device, part)) for part in parts)
        return ops.pack_quantized(shape.n, shape.k, *self.kernel_format(shape), codes, out)


class PackedBlocks(Packed):
    """`Packed` with parts of blocks."""

    block_type: str
    """Key of `BLOCK_TYPES`."""

    def kernel_format(self, shape: PackedShape) -> tuple[QuantFormat, int]:
        """Implement `Packed`."""
        return cast("QuantFormat", self.block_type), 0

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        format, _ = self.kernel_format(shape)
        return ops.pack_blocks([blocks for (blocks,) in parts], format, shape.k, out)
