"""Live view of the engines: server-sent events for the web page and `octavo top`.

The hub works only while there are viewers. At each tick it encodes what is new, once for all
viewers with the same rights, and adds it to their queues. Its work, and that of the engines for it,
is bounded: after a tick, or a map of the KV cache, it rests 300 times as long as that took. Many
viewers receive their events a few at a time, so that no stream waits long.

With several API keys, a viewer sees the ids and sizes of its own key's requests; others have a
number and a state. The operator's key sees all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from octavo import __version__
from octavo.config import ServerConfig
from octavo.errors import QueueFullError
from octavo.frontend.request_memory import leaves_room
from octavo.observability.view_events import Hello, encode_event
from octavo.server.view_picture import INTERVAL, REST, Picture, Update
from octavo.system import clock

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_VIEWERS = 1024
MAX_QUEUE_BYTES = 512 * 2**10
"""Bytes that may wait for a viewer; one that does not read them until the next ones is dropped."""
_VIEWERS_PER_SECOND = 250
_VIEWERS_AT_ONCE = 10
_ALIVE = 15.0
"""Seconds after which a viewer without news receives a comment, so that a lost one is noticed."""
_COMMENT = b":\n\n"


class _Viewer:
    """Queue of the events of one connection.

    Args:
        audience: see `Picture`.
    """

    def __init__(self, audience: str | None) -> None:
        self.audience = audience
        self.is_new = True
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


class ViewHub:
    """Viewers of a server's engines.

    Args:
        config: settings of the server.
        models: names of the model.
    """

    def __init__(self, config: ServerConfig, models: list[str]) -> None:
        self._num_front_ends, self._models = config.api_server_count, models
        self._viewers: dict[_Viewer, None] = {}
        self._held: Counter[str | None] = Counter()
        """Number of viewers by tenant."""
        self._hello: Hello | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    def stop(self) -> None:
        """End all streams, and later ones at once."""
        self._stopped = True
        for viewer in self._viewers:
            viewer.end()

    async def watch(
        self, engine: AsyncLLM, tenant: str | None, *, sees_all: bool
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the events of a new viewer until it is dropped, or the server stops.

        Args:
            engine: the engine.
            tenant: tenant of the viewer's key.
            sees_all: True if it sees the requests of all tenants in detail.

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
        viewer = _Viewer(None if sees_all else tenant or "")
        if self._stopped:
            viewer.end()
        self._viewers[viewer] = None
        self._held[tenant] += 1
        try:
            if len(self._viewers) == 1:
                self._begin(engine)
            async for events in viewer.read():
                yield events
        finally:
            del self._viewers[viewer]
            self._held[tenant] -= 1
            if not self._viewers:
                for task in self._tasks:
                    task.cancel()

    def _begin(self, engine: AsyncLLM) -> None:
        """Begin to work for the first viewer."""
        config, picture = engine.config, Picture(engine)
        self._hello = Hello(
            clock.now(),
            __version__,
            self._models,
            config.cache.block_size,
            engine.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
            config.parallel.num_local_engines,
            config.device.tensor_parallel_size,
            config.device.pipeline_parallel_size,
            self._num_front_ends,
        )
        work = self._work(picture), picture.follow_blocks(), picture.follow_experts()
        self._tasks = [asyncio.create_task(part) for part in work]
        for task in self._tasks:
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """End all streams if the work for them has failed; viewers may connect again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the engine view failed", exc_info=error)
            for viewer in self._viewers:
                viewer.end()

    async def _work(self, picture: Picture) -> None:
        while True:
            begin, worked = time.monotonic(), time.thread_time()
            self._send_history(picture)
            viewers = list(self._viewers)
            update = picture.update((viewer.audience for viewer in viewers), clock.now())
            seconds = time.thread_time() - worked
            for first in range(0, len(viewers), _VIEWERS_AT_ONCE):
                some, worked = viewers[first : first + _VIEWERS_AT_ONCE], time.thread_time()
                for viewer in some:
                    self._send(viewer, update)
                seconds += time.thread_time() - worked
                if len(viewers) > _VIEWERS_AT_ONCE:
                    await asyncio.sleep(_VIEWERS_AT_ONCE / _VIEWERS_PER_SECOND)
            await asyncio.sleep(max(begin + INTERVAL - time.monotonic(), REST * seconds))

    def _send(self, viewer: _Viewer, update: Update) -> None:
        """Send a viewer the events of a tick."""
        if not viewer.is_new:
            viewer.put(update.news(viewer.audience))
            return
        assert self._hello is not None
        hello = msgspec.structs.replace(
            self._hello, time=clock.now(), all_requests=viewer.audience is None
        )
        viewer.put(encode_event("hello", hello) + update.whole(viewer.audience))
        viewer.is_new, viewer.history_end = False, update.first

    def _send_history(self, picture: Picture) -> None:
        """Send some older steps to a few viewers that have received everything else."""
        waiting = [v for v in self._viewers if v.has_read and not v.is_new and v.history_end]
        if not waiting:
            return
        end = waiting[0].history_end
        first, events = picture.history(end)
        for viewer in waiting[:_VIEWERS_AT_ONCE]:
            if viewer.history_end == end:
                viewer.put(events)
                viewer.history_end = first if events else 0
