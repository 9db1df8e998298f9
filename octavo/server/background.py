"""Work that goes on without its client, and the events that it has made so far."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from octavo.errors import RequestError
from octavo.frontend.request_memory import RequestMemory
from octavo.server.errors import show
from octavo.server.resumable_streams import Events

# Bytes of an event in addition to its text.
_EVENT = 48
# The events of one piece of work occupy at most this fraction (1/16) of the memory for requests.
_SHARE = 16
# Approximate bytes that a reader sends at once.
_PIECE = 2**16


class Background:
    """Tasks that go on without their clients."""

    def __init__(self) -> None:
        self.running: dict[tuple[str | None, str], Any] = {}
        """Answers that are being made, by API key and name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[tuple[str | None, str]] = set()
        """Conversations that a response continues, by API key and name."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def hold(self, api_key: str | None, conversation: str) -> Iterator[None]:
        """Keep other responses from continuing a conversation.

        Raises:
            RequestError: another response continues it.
        """
        name = (api_key, conversation)
        if name in self._held:
            error = RequestError(
                f"Another response is being made for the conversation {show(conversation)}; wait "
                "for its end, or cancel it.",
                "conversation",
                "conversation_locked",
            )
            error.status = 409
            raise error
        self._held.add(name)
        try:
            yield
        finally:
            self._held.discard(name)

    async def close(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EventLog:
    """Events of one piece of work so far; a reader gets all from the number that it names.

    Args:
        memory: memory that accounts for the events. If it is short, all events are dropped at
            once. None: nothing accounts for them.
    """

    def __init__(self, memory: RequestMemory | None) -> None:
        self._memory = memory
        self._events: list[bytes] | None = []
        self._nbytes = 0
        self._ended = False
        self._grown = asyncio.Event()

    @classmethod
    def of(cls, events: str) -> EventLog:
        """Return the log of work that has ended, from its events."""
        log = cls(None)
        log._events = split_events(events.encode())
        log._ended = True
        return log

    def joined(self) -> str | None:
        """Return all events; None: they have been dropped."""
        return None if self._events is None else b"".join(self._events).decode()

    def append(self, events: list[bytes]) -> None:
        """Add events."""
        if self._events is not None:
            self._events += events
            self._count(sum(len(event) + _EVENT for event in events))
        self._wake()

    def _count(self, nbytes: int) -> None:
        memory = self._memory
        if memory is None:
            return
        self._nbytes += nbytes
        memory.used += nbytes
        memory.make_room()
        if memory.used > memory.limit or self._nbytes > memory.limit // _SHARE:
            self._events = None
            self.release()

    def end(self) -> None:
        """End the log: no events follow."""
        self._ended = True
        self._wake()

    def release(self) -> None:
        """Release the memory; current readers can continue."""
        if self._memory is not None:
            self._memory.used -= self._nbytes
        self._nbytes = 0

    def check(self, number: int, param: str) -> None:
        """Check that a reader can begin at event `number`.

        Raises:
            RequestError: the work has ended before it, or the events have been dropped.
        """
        if self._events is None:
            raise events_dropped()
        if self._ended and number > len(self._events):
            raise RequestError(
                f"{param}={number - 1} is not the sequence_number of an event; the last one is "
                f"{len(self._events) - 1}.",
                param,
            )

    async def read(self, number: int) -> Events:
        """Yield the events from `number` on, as they are made.

        Raises:
            RequestError: the events have been dropped.
        """
        while True:
            grown = self._grown
            if self._events is None:
                raise events_dropped()
            piece, size = [], 0
            while size < _PIECE and number < len(self._events):
                piece.append(self._events[number])
                size += len(piece[-1])
                number += 1
            if piece:
                yield piece
            elif self._ended:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


def split_events(events: bytes) -> list[bytes]:
    """Return joined server-sent events one by one."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def events_dropped() -> RequestError:
    """Return the error of a reader of events that are no longer there."""
    return RequestError(
        "The events of this response are no longer kept, as memory was short; retrieve it without "
        "stream.",
        "stream",
        "events_not_found",
    )
