"""Array of a step that locates the adapters of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest


class _Filler:
    """Implementation of `StepFiller`: slot and begin of each request's adapter, by row."""

    def __init__(self, max_num_rows: int) -> None:
        self._slots: NDArray[np.int32] = np.full((max_num_rows, 2), -1, np.int32)
        """Slot of each row's tokens before the adapter, which is -1, and of those from it on."""
        self._begins: LongArray = np.zeros(max_num_rows, np.int64)

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._slots[row, 1] = data.adapter_slot
        self._begins[row] = data.adapter_begin

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: a request keeps its adapter."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        before = np.clip(self._begins[rows] - starts, 0, counts)
        lengths = np.stack((before, counts - before), 1)
        out[:] = np.repeat(self._slots[rows].ravel(), lengths.ravel())


@dataclass(frozen=True)
class AdapterSlotsArray:
    """Slot of each token's adapter, int32 [T]; -1: the token has none."""

    name: str = "adapter_slots"
    dtype: str = "int32"
    dims: tuple[str | int, ...] = ("tokens",)

    def make_filler(self, max_num_rows: int) -> _Filler:
        """Implement `StepArray`."""
        return _Filler(max_num_rows)


ADAPTER_SLOTS = AdapterSlotsArray()
