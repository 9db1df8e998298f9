"""Weights in the model's type, and the common part of forms that read floats. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.checkpoints.base import Source
from octavo.kernels.sizes import packed_nbytes
from octavo.quantization.base import PackedShape, Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.kernels.base import Ops, PackedWeight


class FromFloats:
    """Parts of a `WeightForm` that reads one tensor of floats for each module."""

    num_tensors: ClassVar[int] = 1

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        return (Source(f"{module}.weight", (rows, inputs)),)

    def cut(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[slice | Tensor],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`."""
        (tensor,) = tensors
        if columns is not None:
            tensor = tensor[:, slice(*columns)]
        return [(tensor[selected],) for selected in rows]


def floats(parts: Sequence[Part], dtype: torch.dtype) -> list[Tensor]:
    """Return the single tensor of each part, contiguous; round float64 to `dtype`.

    The result is a list even for one part, so that no table of operations keeps a mapped file.
    """
    import torch

    return [
        (tensor.to(dtype) if tensor.dtype == torch.float64 else tensor).contiguous()
        for (tensor,) in parts
    ]


@dataclass(frozen=True)
class Plain(FromFloats):
    """Weights in the model's type."""

    name: ClassVar[str] = "plain"
    max_inputs: ClassVar[int | None] = None

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return packed_nbytes(shape.n, shape.k, shape.dtype)

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: Tensor | None = None
    ) -> PackedWeight:
        """Implement `WeightForm`."""
        import torch

        dtype: torch.dtype = getattr(torch, shape.dtype)
        return ops.pack_weight(floats(parts, dtype), dtype, out)

    def wrap(self, data: Tensor, shape: PackedShape) -> PackedWeight:
        """Implement `WeightForm`."""
        import torch

        from octavo import _native
        from octavo.kernels.base import PackedWeight

        dtype: torch.dtype = getattr(torch, shape.dtype)
        return PackedWeight(data, shape.n, shape.k, dtype, _native.panel())


PLAIN = Plain()
