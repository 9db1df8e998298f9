"""Live view of the engines: server-sent events for the web page and `octavo top`.

The hub works only while there are viewers. At each tick it encodes what is new, once for all
viewers with the same rights, and adds it to their queues. Its work, and that of the engines for it,
is bounded: after a tick, or a map of the KV cache, it rests 300 times as long as that took.

With several API keys, a viewer sees the ids and sizes of its own key's requests; others have a
number and a state. The operator's key sees all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from octavo import __version__
from octavo.config import ServerConfig
from octavo.observability.view_events import Hello, encode_event
from octavo.server.view_picture import Picture, Update
from octavo.server.viewers import VIEWERS_AT_ONCE, Viewer, Viewers
from octavo.system import clock

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class ViewHub:
    """Viewers of a server's engines.

    Args:
        config: settings of the server.
        models: names of the model.
    """

    def __init__(self, config: ServerConfig, models: list[str]) -> None:
        self._num_front_ends, self._models = config.api_server_count, models
        self._viewers = Viewers()
        self._hello: Hello | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    def stop(self) -> None:
        """End all streams, and later ones at once."""
        self._viewers.stop()

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
        with self._viewers.add(None if sees_all else tenant or "", tenant) as viewer:
            if len(self._viewers) == 1:
                self._begin(engine)
            try:
                async for events in viewer.read():
                    yield events
            finally:
                if len(self._viewers) == 1:
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
            self._viewers.end_all()

    async def _work(self, picture: Picture) -> None:
        while True:
            begin, worked = time.monotonic(), time.thread_time()
            self._send_history(picture)
            audiences = (viewer.audience for viewer in self._viewers)
            update = picture.update(audiences, clock.now())
            seconds = time.thread_time() - worked
            await self._viewers.send(begin, seconds, partial(self._send, update))

    def _send(self, update: Update, viewer: Viewer) -> None:
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
        for viewer in waiting[:VIEWERS_AT_ONCE]:
            if viewer.history_end == end:
                viewer.put(events)
                viewer.history_end = first if events else 0
