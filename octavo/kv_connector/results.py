"""What threads of a worker have loaded, until the step's thread or a notice takes it away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


class LoadResults:
    """Requests whose blocks have been loaded, and blocks that are not what they should be.

    Args:
        notify: called when there is something new.
    """

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._damaged: set[int] = set()

    def run(self, req_id: str, block_ids: Iterable[int], copy: Callable[[], set[int]]) -> None:
        """Has a request's blocks loaded, on the calling thread; never raises.

        Args:
            req_id: the request.
            block_ids: all of them.
            copy: loads them, and returns those that are damaged; if it raises, all are.
        """
        try:
            damaged = copy()
        except Exception:
            logger.exception("KV blocks could not be loaded")
            damaged = set(block_ids)
        with self._lock:
            self._finished.add(req_id)
            self._damaged |= damaged
        self._notify()

    def take_finished(self) -> set[str]:
        """Requests whose loading has ended."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_damaged(self) -> set[int]:
        """Blocks of theirs that are not right."""
        with self._lock:
            damaged, self._damaged = self._damaged, set()
        return damaged


class Complaint:
    """Says what is wrong once, and again when it is something else."""

    def __init__(self) -> None:
        self._said = ""

    def make(self, text: str) -> None:
        """Logs it."""
        if text != self._said:
            self._said = text
            logger.warning("%s: they will be computed", text)
