"""Viewers of the engine view: their queues, their number, and the pace of their events.

Many viewers receive their events a few at a time, so that no stream waits long.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from octavo.errors import QueueFullError
from octavo.frontend.request_memory import leaves_room
from octavo.kv_cache.block_map import INTERVAL, REST

MAX_VIEWERS = 1024
MAX_QUEUE_BYTES = 512 * 2**10
"""Bytes that may wait for a viewer; one that does not read them until the next ones is dropped."""
VIEWERS_AT_ONCE = 10
_VIEWERS_PER_SECOND = 125
_ALIVE = 15.0
"""Seconds after which a viewer without news receives a comment, so that a lost one is noticed."""
_COMMENT = b":\n\n"


class Viewer:
    """Queue of the events of one connection.

    Args:
        audience: what it may see; viewers with the same audience receive the same events.
    """

    def __init__(self, audience: str | None) -> None:
        self.audience = audience
        self.is_new = True
        """True if it has not received the whole state yet."""
        self.history_end = 0
        """Number of the first step that it has received."""
        self._queue: deque[bytes] = deque([_COMMENT])
        self._nbytes = 0
        self._last = time.monotonic()
        self._changed = asyncio.Event()
        self._ended = False

    @property
    def has_read(self) -> bool:
        """True if it has received all events so far."""
        return not (self._queue or self._ended)

    def put(self, events: bytes) -> None:
        """Add events; end the stream if too many wait."""
        if self._ended or not (events or time.monotonic() > self._last + _ALIVE):
            return
        if self._nbytes > MAX_QUEUE_BYTES:
            self._queue.clear()
            self.end()
            return
        self._last = time.monotonic()
        self._queue.append(events or _COMMENT)
        self._nbytes += len(events)
        self._changed.set()

    def end(self) -> None:
        """End the stream after the events in the queue."""
        self._ended = True
        self._changed.set()

    async def read(self) -> AsyncGenerator[list[bytes], None]:
        """Yield the events as they come."""
        while self._queue or not self._ended:
            self._changed.clear()
            while self._queue:
                events = self._queue.popleft()
                self._nbytes -= len(events)
                yield [events]
            if not self._ended:
                await self._changed.wait()


class Viewers:
    """All viewers of a server or router."""

    def __init__(self) -> None:
        self._viewers: dict[Viewer, None] = {}
        self._held: Counter[str | None] = Counter()
        """Number of viewers by tenant."""
        self._stopped = False

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    def __iter__(self) -> Iterator[Viewer]:
        """Iterate over the viewers, in order of their arrival."""
        return iter(self._viewers)

    @contextmanager
    def add(self, audience: str | None, tenant: str | None) -> Iterator[Viewer]:
        """Hold a place for a viewer.

        Args:
            audience: see `Viewer`.
            tenant: tenant of the viewer's key.

        Raises:
            QueueFullError: there are too many viewers.
        """
        free, held = MAX_VIEWERS - len(self._viewers), self._held[tenant]
        if free < 1 or (tenant is not None and not leaves_room(held, 1, free)):
            raise QueueFullError(
                f"The engine view has {len(self._viewers)} viewers, {held} of them with this API "
                f"key, and the limit is {MAX_VIEWERS}; close others, or try again later.",
                5,
            )
        viewer = Viewer(audience)
        if self._stopped:
            viewer.end()
        self._viewers[viewer] = None
        self._held[tenant] += 1
        try:
            yield viewer
        finally:
            del self._viewers[viewer]
            self._held[tenant] -= 1

    def stop(self) -> None:
        """End all streams, and later ones at once."""
        self._stopped = True
        self.end_all()

    def end_all(self) -> None:
        """End all streams; viewers may connect again."""
        for viewer in self._viewers:
            viewer.end()

    async def send(self, begin: float, seconds: float, send: Callable[[Viewer], None]) -> None:
        """Send the events of a tick, and wait until the next tick may begin.

        Args:
            begin: begin of the tick, as second of `time.monotonic`.
            seconds: processor time of the tick so far.
            send: sends a viewer its events.
        """
        viewers = list(self._viewers)
        for first in range(0, len(viewers), VIEWERS_AT_ONCE):
            some, worked = viewers[first : first + VIEWERS_AT_ONCE], time.thread_time()
            for viewer in some:
                send(viewer)
            seconds += time.thread_time() - worked
            if len(viewers) > VIEWERS_AT_ONCE:
                await asyncio.sleep(VIEWERS_AT_ONCE / _VIEWERS_PER_SECOND)
        await asyncio.sleep(max(begin + INTERVAL - time.monotonic(), REST * seconds))
