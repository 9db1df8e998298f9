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
    """Implementation of `StepFiller`: the slot of each request's adapter, by row."""

    def __init__(self, max_num_rows: int) -> None:
        self._slots: NDArray[np.int32] = np.full(max_num_rows, -1, np.int32)

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._slots[row] = data.adapter_slot

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: a request keeps its adapter."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = np.repeat(self._slots[rows], counts)


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
