"""The contract of a weight's form. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.checkpoints.base import Source

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight

Part = tuple["Tensor", ...]
"""Rows of a module: the same rows of each tensor that the form reads."""


@dataclass(frozen=True)
class PackedShape:
    """The shape of a packed weight, and the model's type."""

    n: int
    """Outputs."""
    k: int
    """Inputs."""
    dtype: str
    """The model's type: "float32", "float16" or "bfloat16"."""
    whole: int | None = None
    """Outputs of the weight that these are a part of, which is packed as the whole is."""


class WeightForm(Protocol):
    """How a linear weight is stored in a checkpoint, and how it is packed; a frozen dataclass.

    Any shape is allowed: padding fills up incomplete groups and adds nothing to a product.
    """

    @property
    def name(self) -> str:
        """Name of the form with all its parameters: the keys of kept weights hold it."""
        ...

    @property
    def max_inputs(self) -> int | None:
        """The largest number of inputs; None: there is no limit."""
        ...

    @property
    def num_tensors(self) -> int:
        """Number of tensors that it reads for each module."""
        ...

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the tensors of a module in the checkpoint, `num_tensors` of them.

        Args:
            module: the module's name in the checkpoint.
            rows: its outputs.
            inputs: its inputs.
        """
        ...

    def cut(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[slice | Tensor],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Return parts of a module: views where possible.

        Args:
            tensors: the tensors of `sources`.
            rows: the outputs of each part: a range, or indices int64.
            columns: inputs [begin, end) of all parts; None: all.
        """
        ...

    def nbytes(self, shape: PackedShape) -> int:
        """Return the bytes of a packed weight."""
        ...

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: Tensor | None = None
    ) -> PackedWeight | QuantizedWeight:
        """Return a packed weight.

        Args:
            ops: the table of operations that will use it.
            parts: its rows; they are stacked.
            shape: its shape.
            out: memory for the result: uint8 [`nbytes`].
        """
        ...

    def wrap(self, data: Tensor, shape: PackedShape) -> PackedWeight | QuantizedWeight:
        """Return a weight that was packed before, from its bytes: uint8 [`nbytes`]."""
        ...
