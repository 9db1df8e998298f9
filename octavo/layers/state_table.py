"""Arrays of a step that locate the recurrent states of its requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest


class _RowSlots(ABC):
    """Slots of the requests' states, by row.

    A request has n slots in rotation: the state after its token at position p is in slot p mod n.
    A step that computes drafts stores the states after its last n tokens. So the next step finds
    the state before its first token, however many drafts were accepted.
    """

    def __init__(self, max_num_rows: int) -> None:
        self._slots: dict[int, list[int]] = {}
        self._first: LongArray = np.zeros(max_num_rows, np.int64)
        self._sources: LongArray = np.full(max_num_rows, -1, np.int64)

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._slots[row] = data.state_slots
        self._first[row] = data.num_computed_tokens
        self._sources[row] = data.state_source

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: only snapshots change from step to step."""

    @abstractmethod
    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        """Implement `StepFiller`."""


class _Sources(_RowSlots):
    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            slots = self._slots[row]
            is_first = start == self._first[row]
            out[i] = self._sources[row] if is_first else slots[(start - 1) % len(slots)]


class _Slots(_RowSlots):
    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = -1
        ends = np.cumsum(counts)
        lists = rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist()
        for row, start, count, end in zip(*lists, strict=True):
            slots = self._slots[row]
            for i in range(min(count, len(slots))):
                out[end - 1 - i] = slots[(start + count - 1 - i) % len(slots)]


class _Snapshots(_RowSlots):
    def __init__(self, max_num_rows: int) -> None:
        super().__init__(max_num_rows)
        self._snapshots: dict[int, list[tuple[int, int]]] = {}

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._snapshots.pop(row, None)

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        if request.snapshots:
            self._snapshots.setdefault(row, []).extend(request.snapshots)

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = -1
        if not self._snapshots:
            return
        ends = np.cumsum(counts)
        lists = rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist()
        for row, start, count, end in zip(*lists, strict=True):
            snapshots = self._snapshots.get(row)
            if snapshots is None:
                continue
            # Drafts before a snapshot may be wrong. Then a later step computes its tokens again.
            later = [(position, slot) for position, slot in snapshots if position > start]
            for position, slot in later:
                if position <= start + count:
                    out[end - count + position - start - 1] = slot
            if later:
                self._snapshots[row] = later
            else:
                del self._snapshots[row]


_FILLERS: dict[str, type[_RowSlots]] = {
    "state_sources": _Sources,
    "state_slots": _Slots,
    "snapshot_slots": _Snapshots,
}


@dataclass(frozen=True)
class StateTableArray:
    """A `StepArray` of slots, int32."""

    name: str
    dims: tuple[str, ...]
    dtype: str = "int32"

    def make_filler(self, max_num_rows: int) -> _RowSlots:
        """Implement `StepArray`."""
        return _FILLERS[self.name](max_num_rows)


STATE_SOURCES = StateTableArray("state_sources", ("requests",))
"""Slot with the state before each request's first token; -1: zeros."""
STATE_SLOTS = StateTableArray("state_slots", ("tokens",))
"""Slot that receives the state after each token; -1: none."""
SNAPSHOT_SLOTS = StateTableArray("snapshot_slots", ("tokens",))
"""Slot of the prefix cache that receives the state after each token; -1: none."""
STATE_ARRAYS = STATE_SOURCES, STATE_SLOTS, SNAPSHOT_SLOTS
