"""Results of the threads of a worker that load blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


class LoadResults:
    """Requests whose blocks have been loaded, and blocks whose contents are wrong.

    Args:
        notify: callback for new results.
    """

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._damaged: set[int] = set()

    def run(self, req_id: str, block_ids: Iterable[int], copy: Callable[[], set[int]]) -> None:
        """Load a request's blocks on the calling thread; never raise.

        Args:
            req_id: the request.
            block_ids: all of its blocks to load.
            copy: loads them and returns the damaged ones; if it raises, all are damaged.
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
        """Return the requests whose loading has ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_damaged(self) -> set[int]:
        """Return the damaged blocks of loads that ended since the last call."""
        with self._lock:
            damaged, self._damaged = self._damaged, set()
        return damaged


class OnceLogger:
    """Logger that does not repeat its last warning."""

    def __init__(self) -> None:
        self._said = ""

    def warning(self, text: str) -> None:
        """Log a warning, unless it was the last one."""
        if text != self._said:
            self._said = text
            logger.warning("%s: they will be computed", text)
