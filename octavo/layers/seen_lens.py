"""Array of a step with the number of tokens of each text that the text's tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest

SEEN_LENS = "seen_lens"
"""Name of the array."""


class _SeenLens:
    def __init__(self, max_num_rows: int, mask: int) -> None:
        self._mask = mask
        self._lens: LongArray = np.zeros(max_num_rows, np.int64)

    def add_row(self, row: int, data: NewRequestData) -> None:
        tokens = data.token_ids
        seen = len(tokens)
        while seen > 1 and tokens[seen - 1] == self._mask:
            seen -= 1
        self._lens[row] = seen

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: a text does not change."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = self._lens[rows]


@dataclass(frozen=True)
class SeenLensArray:
    """A `StepArray` of numbers of tokens, int32: all but the masks at the end of a text."""

    mask: int
    """Token of the masks."""
    name: str = SEEN_LENS
    dims: tuple[str, ...] = ("requests",)
    dtype: str = "int32"

    def make_filler(self, max_num_rows: int) -> _SeenLens:
        """Implement `StepArray`."""
        return _SeenLens(max_num_rows, self.mask)
