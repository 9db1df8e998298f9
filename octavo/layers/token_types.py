"""Array of a step with the type of each token: 1 in the second text of a pair, else 0 (BERT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest


class _Types:
    def __init__(self, max_num_rows: int, second: int) -> None:
        self._second = second
        self._begins: LongArray = np.zeros(max_num_rows, np.int64)
        """Index of the second text's first token in each row; 0: there is one text."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._begins[row] = 0 if data.pooling is None else data.pooling.second_begin

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: types do not change."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = 0
        begins, ends = self._begins[rows], np.cumsum(counts)
        for i in np.flatnonzero(begins):
            out[ends[i] - counts[i] + begins[i] : ends[i]] = self._second  # a text is whole


@dataclass(frozen=True)
class TokenTypesArray:
    """A `StepArray` of types, int64."""

    second: int = 1
    """Type of the second text: 0 for models with one type."""
    name: str = "token_types"
    dims: tuple[str, ...] = ("tokens",)
    dtype: str = "int64"

    def make_filler(self, max_num_rows: int) -> _Types:
        """Implement `StepArray`."""
        return _Types(max_num_rows, self.second)


TOKEN_TYPES = TokenTypesArray()
"""Type of each token of a model with two types."""
