"""Rows that replace the embeddings of a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.kernels.base import Ops
from octavo.system.tensor import Tensor, zeros


class EmbedWriter:
    """Writer of the rows of prompts and encoders into the inputs of a model.

    Args:
        ops: the model's table of operations.
        embed_size: size of an embedding.
        dtype: type of the model.
        deepstack: `StepContext.deepstack` of the largest step, filled with zeros.
    """

    def __init__(
        self, ops: Ops, embed_size: int, dtype: str, deepstack: Sequence[Tensor] = ()
    ) -> None:
        self._ops, self._size, self._dtype = ops, embed_size, dtype
        self.deepstack = deepstack
        self._used: list[tuple[int, int]] = []
        """Ranges of tokens with numbers other than zero in `deepstack`."""

    def clear(self) -> None:
        """Fill the rows of `deepstack` that the last step has written with zeros again."""
        for begin, end in self._used:
            for level in self.deepstack:
                part = level[begin:end]
                zero = zeros(*part.shape, dtype=self._dtype)
                self._ops.copy_(part, self._ops.to_device(zero))
        self._used = []

    def write(self, x: Tensor, embeds: Iterable[tuple[int, Tensor]]) -> None:
        """Write `StepInputs.embeds` to the rows of their tokens.

        Args:
            x: embeddings of the step's tokens, [T, embed_size]; changed in place.
            embeds: the rows.
        """
        copy, size = self._ops.copy_, self._size
        self.clear()
        for begin, rows in embeds:
            end = begin + len(rows)
            copy(x[begin:end], rows[:, :size])
            if rows.shape[1] == size:
                continue
            self._used.append((begin, end))
            for i, level in enumerate(self.deepstack, 1):
                copy(level[begin:end], rows[:, i * size : (i + 1) * size])
