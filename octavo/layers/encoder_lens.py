"""Array of a step with the number of the encoder's rows that each request's tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest


class _EncoderLens:
    def __init__(self, max_num_rows: int) -> None:
        self._lens: LongArray = np.zeros(max_num_rows, np.int64)

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._lens[row] = sum(item.num_rows for item in data.mm_features)

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: the encoder's input does not change."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = self._lens[rows]


@dataclass(frozen=True)
class EncoderLensArray:
    """A `StepArray` of numbers of rows, int32."""

    name: str = "encoder_lens"
    dims: tuple[str, ...] = ("requests",)
    dtype: str = "int32"

    def make_filler(self, max_num_rows: int) -> _EncoderLens:
        """Implement `StepArray`."""
        return _EncoderLens(max_num_rows)


ENCODER_LENS = EncoderLensArray()
