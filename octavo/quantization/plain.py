"""Weights in the model's type, and the common part of forms that read floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.checkpoints.base import Source
from octavo.kernels.sizes import packed_nbytes
from octavo.quantization.base import IntArray, PackedShape, Part, select_rows

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight
    from octavo.system.tensor import HostTensor


class FromFloats:
    """Parts of a `WeightForm` that reads one tensor of floats for each module."""

    num_tensors: ClassVar[int] = 1

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        return (Source(f"{module}.weight", (rows, inputs)),)

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`."""
        (tensor,) = tensors
        if columns is not None:
            tensor = tensor[:, slice(*columns)]
        return select_rows(tensor, rows)


def floats(parts: Sequence[Part], dtype: str) -> list[HostTensor]:
    """Return the single tensor of each part, contiguous; round float64 to `dtype`.

    The result is a list even for one part, so that no table of operations keeps a mapped file.
    """
    from octavo.system.tensor import dense

    return [dense(tensor, dtype if tensor.dtype == "float64" else None) for (tensor,) in parts]


@dataclass(frozen=True)
class Plain(FromFloats):
    """Weights in the model's type."""

    name: ClassVar[str] = "plain"
    max_inputs: ClassVar[int | None] = None

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return packed_nbytes(shape.n, shape.k, shape.dtype)

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight:
        """Implement `WeightForm`."""
        return ops.pack_weight(floats(parts, shape.dtype), shape.dtype, out)

    def wrap(self, data: HostTensor, shape: PackedShape) -> PackedWeight:
        """Implement `WeightForm`."""
        from octavo import _native
        from octavo.kernels.weights import PackedWeight

        return PackedWeight(data, shape.n, shape.k, shape.dtype, _native.panel())


PLAIN = Plain()
