"""The contract of a weight's form. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.checkpoints.base import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight

Part = tuple["Tensor", ...]
"""Rows of a module: the same rows of each tensor that the form reads."""


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

    def nbytes(self, n: int, k: int, dtype: str, whole: int | None = None) -> int:
        """Return the bytes of a packed weight with `n` outputs and `k` inputs.

        Args:
            n: outputs.
            k: inputs.
            dtype: the model's type: "float32", "float16" or "bfloat16".
            whole: outputs of the weight that these are a part of, which is packed as the whole is.
        """
        ...

    def pack(
        self,
        ops: Ops,
        parts: Sequence[Part],
        dtype: torch.dtype,
        out: Tensor | None = None,
        whole: int | None = None,
    ) -> PackedWeight | QuantizedWeight:
        """Return a packed weight.

        Args:
            ops: the table of operations that will use it.
            parts: its rows; they are stacked.
            dtype: the model's type.
            out: memory for the result: uint8 [`nbytes`].
            whole: see `nbytes`.
        """
        ...

    def wrap(
        self,
        data: Tensor,
        n: int,
        k: int,
        dtype: torch.dtype,
        panel: int,
        whole: int | None = None,
    ) -> PackedWeight | QuantizedWeight:
        """Return a weight that was packed before.

        Args:
            data: its bytes: uint8 [`nbytes`].
            n: outputs.
            k: inputs.
            dtype: the model's type.
            panel: outputs of a panel, as the kernels have them.
            whole: see `nbytes`.
        """
        ...
