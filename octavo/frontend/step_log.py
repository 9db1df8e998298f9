"""The front end's log of its engines' recent steps, from which `explain` and the view are made."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from octavo.observability.steps import StepRecord

MAX_SECONDS = 600.0
MAX_BYTES = 16 * 2**20
# Bytes of an entry besides its record.
_ENTRY = 160
_DECODER = msgspec.msgpack.Decoder(StepRecord)


class _Number(msgspec.Struct, array_like=True):
    """First field of a `StepRecord`."""

    number: int


_NUMBER = msgspec.msgpack.Decoder(_Number)


class LoggedStep(NamedTuple):
    """Entry of the log."""

    time: float
    """Time of the message that contained the record."""
    engine_index: int
    data: bytes
    """`StepRecord` as msgpack."""

    @property
    def record(self) -> StepRecord:
        """The decoded record."""
        return _DECODER.decode(self.data)


class EngineDeath(NamedTuple):
    """Death of an engine whose requests continued."""

    time: float
    """Time at which the requests could continue."""
    seconds: float
    """Time since the detection of the death."""
    engine_index: int
    reason: str


class StepLog:
    """Log of recent steps and deaths; the oldest steps are dropped.

    Args:
        max_seconds: age at which a step is dropped.
        max_bytes: maximum memory of all steps.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_seconds, self._max_bytes = max_seconds, max_bytes
        self._steps: deque[LoggedStep] = deque()
        self._events: deque[LoggedStep] = deque()
        """Records that are no steps, but have events."""
        self.nbytes = 0
        self.num_dropped = 0
        """Number of dropped steps: the first step in the log has this number, counted from 0."""
        self.deaths: deque[EngineDeath] = deque(maxlen=64)
        self.ready: float | None = None
        """Time at which the model was loaded; None: it is not loaded yet."""

    @property
    def end(self) -> int:
        """Number of the next step that is logged, counted from 0."""
        return self.num_dropped + len(self._steps)

    def add(self, engine_index: int, time: float, steps: Iterable[msgspec.Raw]) -> None:
        """Log the steps of a message from an engine; `time` is the time of the message."""
        for step in steps:
            logged = LoggedStep(time, engine_index, bytes(step))
            is_step = _NUMBER.decode(logged.data).number > 0
            (self._steps if is_step else self._events).append(logged)
            self.nbytes += len(logged.data) + _ENTRY
        oldest = time - self._max_seconds
        while (log := self._older) and (self.nbytes > self._max_bytes or log[0].time < oldest):
            self.nbytes -= len(log.popleft().data) + _ENTRY
            self.num_dropped += log is self._steps

    @property
    def _older(self) -> deque[LoggedStep]:
        """The log with the oldest record; it is empty if both are."""
        if not self._steps or (self._events and self._events[0].time < self._steps[0].time):
            return self._events
        return self._steps

    @property
    def lost_until(self) -> float:
        """Time before which steps may have been dropped; 0: none was."""
        return self._steps[0].time if self.num_dropped and self._steps else 0.0

    def since(self, number: int) -> list[LoggedStep]:
        """Return the logged steps from `number` on; see `end`."""
        first = max(0, number - self.num_dropped)
        return [self._steps[i] for i in range(first, len(self._steps))]

    def between(self, begin: float, end: float) -> Iterator[LoggedStep]:
        """Yield the logged records with a time from `begin` to `end`, both included."""
        for logged in heapq.merge(self._steps, self._events, key=lambda logged: logged.time):
            if begin <= logged.time <= end:
                yield logged
