"""Inbox of the adapters that workers have read, for the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable

from octavo.messages import AdapterLoaded


class AdapterInbox:
    """Inbox for results of workers; `take` returns those that every rank has reported.

    Args:
        world_size: number of ranks.
        wake: callback for new results of `take`; any thread may call it.
    """

    def __init__(self, world_size: int, wake: Callable[[], object] = lambda: None) -> None:
        self._world_size, self._wake = world_size, wake
        self._condition = threading.Condition()
        self._reported: dict[int, list[AdapterLoaded]] = {}
        """Results of some ranks, by slot."""
        self._done: list[AdapterLoaded] = []

    @property
    def has_finished(self) -> bool:
        """True if `take` has a result."""
        return bool(self._done)

    def put(self, loaded: AdapterLoaded) -> None:
        """Add the result of a rank. Any thread may call this."""
        with self._condition:
            reported = self._reported.setdefault(loaded.slot, [])
            reported.append(loaded)
            if len(reported) < self._world_size:
                return
            del self._reported[loaded.slot]
            self._done.append(next((one for one in reported if one.error is not None), loaded))
            self._condition.notify_all()
        self._wake()

    def take(self) -> list[AdapterLoaded]:
        """Return the results since the last call; an error of any rank counts for all."""
        with self._condition:
            done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> None:
        """Wait until `take` has a result, at most the given time."""
        with self._condition:
            self._condition.wait_for(lambda: self.has_finished, seconds)
