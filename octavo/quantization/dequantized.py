"""Weights of a quantized checkpoint as numbers in the model's type: no activation is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from octavo.checkpoints.base import Source
from octavo.quantization.base import IntArray, PackedShape, Part, WeightForm
from octavo.quantization.plain import PLAIN, FromFloats, Plain

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class StoredOtherwise:
    """Weights that are plain in memory, but have another form in a checkpoint."""

    stored: WeightForm
    """Form of the weight in the checkpoint."""

    @property
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""
        return self.stored.num_tensors

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        return self.stored.sources(module, rows, inputs)

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`."""
        return self.stored.cut(tensors, rows, columns)

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return PLAIN.nbytes(shape)

    def wrap(self, data: HostTensor, shape: PackedShape) -> PackedWeight:
        """Implement `WeightForm`."""
        return PLAIN.wrap(data, shape)


@dataclass(frozen=True)
class Dequantized(StoredOtherwise):
    """Weights that a checkpoint quantizes."""

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"dequantized {self.stored.name}"

    @property
    def max_inputs(self) -> int | None:
        """Implement `WeightForm`."""
        return self.stored.max_inputs

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight:
        """Implement `WeightForm`."""
        return ops.pack_weight([self.numbers(parts, shape)], shape.dtype, out)

    def numbers(self, parts: Sequence[Part], shape: PackedShape) -> HostTensor:
        """Return the weight [n, k] in the model's type."""
        from octavo.quantization.numbers import NumberOps

        packed = self.stored.pack(NumberOps(shape.dtype), parts, shape)
        return cast("HostTensor", packed.data)


def as_numbers(forms: Sequence[WeightForm]) -> Plain | Dequantized:
    """Return the form of a module's numbers in the model's type, from the form that was chosen.

    Args:
        forms: the forms of a projection's modules, the first of which counts; empty: plain.
    """
    form = forms[0] if forms else PLAIN
    if isinstance(form, FromFloats):
        return PLAIN
    return form if isinstance(form, Dequantized) else Dequantized(form)
