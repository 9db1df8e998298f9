"""Interface of a weight's form: plain, or quantized in some format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight, QuantizedWeight
    from octavo.system.tensor import HostTensor

IntArray = NDArray[np.int64]
Part = tuple["HostTensor", ...]
"""Rows of a module: the same rows of each tensor that the form reads."""


@dataclass(frozen=True)
class PackedShape:
    """Shape of a packed weight, and the model's data type."""

    n: int
    """Number of outputs."""
    k: int
    """Number of inputs."""
    dtype: str
    """Type of the model: "float32", "float16" or "bfloat16"."""
    whole: int | None = None
    """Number of outputs of the whole weight, if the weight may be a rank's part: the shape of the
    whole weight decides the format of all parts."""


class TensorError(Exception):
    """Error for a tensor with impossible numbers.

    Args:
        tensor: last part of the tensor's name.
        reason: the reason, and the fix.
    """

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"{tensor} {reason}")


def select_rows(tensor: HostTensor, rows: Sequence[slice | IntArray]) -> list[Part]:
    """Return parts of a form with one tensor: views where rows are slices.

    Args:
        tensor: [outputs, ...].
        rows: as in `WeightForm.cut`.
    """
    from octavo.system.tensor import from_numpy

    return [
        (tensor[part] if isinstance(part, slice) else from_numpy(tensor.numpy()[part]),)
        for part in rows
    ]


class WeightForm(Protocol):
    """Form of a linear weight in a checkpoint and in memory; a frozen dataclass.

    Any shape is allowed: zeros pad incomplete groups.
    """

    @property
    def name(self) -> str:
        """Name of the form with all its parameters; the weight cache's keys contain it."""
        ...

    @property
    def max_inputs(self) -> int | None:
        """Largest number of inputs; None: no limit."""
        ...

    @property
    def num_tensors(self) -> int:
        """Number of tensors of each module."""
        ...

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the `num_tensors` tensors of a module in the checkpoint.

        Args:
            module: the module's name in the checkpoint.
            rows: number of its outputs.
            inputs: number of its inputs.
        """
        ...

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Return parts of a module: views where possible.

        Args:
            tensors: the tensors of `sources`.
            rows: the outputs of each part: a slice, or int64 indices.
            columns: inputs [begin, end) of all parts; None: all.

        Raises:
            TensorError: the numbers of a tensor are impossible, or cannot be cut here.
        """
        ...

    def nbytes(self, shape: PackedShape) -> int:
        """Return the bytes of a packed weight."""
        ...

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight | QuantizedWeight:
        """Return a packed weight.

        Args:
            ops: the table of operations that will use it.
            parts: rows of the weight, which are stacked.
            shape: its shape.
            out: memory for the result: uint8 [`nbytes`].

        Raises:
            TensorError: the parts do not fit together.
        """
        ...

    def wrap(self, data: HostTensor, shape: PackedShape) -> PackedWeight | QuantizedWeight:
        """Return a packed weight for the bytes that `pack` wrote earlier: uint8 [`nbytes`]."""
        ...


Groups = Sequence[tuple[Sequence[str], WeightForm]]
"""Modules and their form: the first entry that matches a module counts. "Linear" matches all
modules except the LM head, and "LMHead" the LM head; a text that begins with re: is a regular
expression for the beginning of names; any other text matches consecutive parts of a name. An LM
head that is tied to the embedding is always plain."""
