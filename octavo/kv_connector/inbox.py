"""Inbox of the transfers that workers have finished, for the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable

from octavo.messages import KVConnectorOutput


class TransferInbox:
    """Inbox for finished transfers; `take` returns the transfers that every rank has finished.

    Args:
        world_size: number of ranks.
        wake: callback for new results of `take`; any thread may call it.
    """

    def __init__(self, world_size: int, wake: Callable[[], object] = lambda: None) -> None:
        self._world_size, self._wake = world_size, wake
        self._condition = threading.Condition()
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        """Number of ranks that have received a request's blocks."""
        self._invalid: dict[str, set[int]] = {}
        """Invalid blocks of requests that some ranks have not yet received."""
        self._output = KVConnectorOutput()

    @property
    def has_finished(self) -> bool:
        """True if `take` has a result."""
        return bool(self._output.finished_sending or self._output.finished_recving)

    def put(self, output: KVConnectorOutput) -> None:
        """Add the finished transfers of a rank. Any thread may call this."""
        with self._condition:
            for req_id in output.finished_sending:
                self._count(req_id, self._sent, self._output.finished_sending)
            for req_id in output.finished_recving:
                self._invalid.setdefault(req_id, set()).update(output.invalid_block_ids)
                if self._count(req_id, self._received, self._output.finished_recving):
                    self._output.invalid_block_ids += self._invalid.pop(req_id)
            if not self.has_finished:
                return
            self._condition.notify_all()
        self._wake()

    def _count(self, req_id: str, counts: dict[str, int], done: list[str]) -> bool:
        """Count one more rank of a request; return True if all ranks have finished."""
        count = counts.pop(req_id, 0) + 1
        if count < self._world_size:
            counts[req_id] = count
            return False
        done.append(req_id)
        return True

    def take(self) -> KVConnectorOutput:
        """Return the transfers that all ranks have finished since the last call."""
        with self._condition:
            output, self._output = self._output, KVConnectorOutput()
        return output

    def wait(self, seconds: float) -> None:
        """Wait until `take` has a result, at most the given time."""
        with self._condition:
            self._condition.wait_for(lambda: self.has_finished, seconds)
