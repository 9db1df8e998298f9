"""Streams that outlive their connections: a client that reconnects gets the missed events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from starlette.types import Receive

from octavo.errors import NotFoundError, RequestError
from octavo.frontend.request_memory import RequestMemory
from octavo.server.errors import (
    ClientDisconnectError,
    UnavailableError,
    error_event,
    log_unexpected,
    show,
)

Events = AsyncGenerator[list[bytes], None]
"""Batches of whole server-sent events."""

DONE = b"data: [DONE]\n\n"
# Bytes of a stream's records, and of an event in addition to its text.
_RECORD = 6144
_EVENT = 48
# One stream's events occupy at most this fraction (1/16) of the memory for requests.
_SHARE = 16
# Bytes of the newest events that are kept even without free memory.
_NEWEST = 2**16
# Approximate bytes that a reader sends at once.
_PIECE = 2**16


class Run(Protocol):
    """Type of `ServerState.run`."""

    def __call__(
        self, receive: Receive, work: Coroutine[object, object, None], deadline: float | None
    ) -> Coroutine[Any, Any, None]:
        """Run the work until the deadline, or until `receive` returns http.disconnect."""


class StreamRegistry:
    """Streams of one server to which a client may reconnect.

    Args:
        grace: seconds for which a stream without a reader is kept; 0: none is kept.
        run: runs the work of a stream.
    """

    def __init__(self, grace: float, run: Run) -> None:
        self.grace = grace
        self.run = run
        self.draining = False
        self._memory: RequestMemory | None = None
        self._streams: dict[tuple[str | None, str], Stream] = {}
        self._finished: dict[Stream, None] = {}
        """Finished streams, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def memory(self) -> RequestMemory:
        """Memory that accounts for the events; available when the engine is."""
        assert self._memory is not None
        return self._memory

    @memory.setter
    def memory(self, memory: RequestMemory) -> None:
        self._memory = memory
        memory.spare = self._spare

    def __len__(self) -> int:
        """Return the number of kept streams, running or finished."""
        return len(self._streams)

    def open(
        self, name: str, api_key: str | None, events: Events, deadline: float | None
    ) -> Stream | None:
        """Start a stream.

        Args:
            name: ID of the answer, printable ASCII.
            api_key: key that is allowed to read the stream.
            events: generator of the events, without the last one ([DONE]).
            deadline: latest end of the events, as second of `time.monotonic`.

        Returns:
            The stream. None, with `events` untouched, if the stream would not be kept: the grace
            is 0, the server drains, or the name is in use. The earlier stream stays, so that no
            client can replace it.
        """
        if not self.grace or self.draining or (api_key, name) in self._streams:
            return None
        stream = self._streams[api_key, name] = Stream(self, name, api_key, events, deadline)
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        return stream

    def find(self, name: str, api_key: str | None) -> Stream:
        """Return the stream with the given name.

        Raises:
            NotFoundError: the key has no stream with that name.
        """
        stream = self._streams.get((api_key, name))
        if stream is not None:
            stream.start_grace()  # so that it is not dropped just before it is read
            return stream
        if not self.grace:
            reason = "this server keeps none; start it with --resume-grace SECONDS"
        else:
            reason = (
                "it never was, failed before it began, was not read for --resume-grace "
                f"({self.grace:g}) seconds, or its memory was needed; send the request again"
            )
        raise NotFoundError(f"There is no stream {show(name)}: {reason}.", None, "stream_not_found")

    def forget(self, stream: Stream) -> None:
        """Drop a stream and release its memory."""
        key = (stream.api_key, stream.name)
        if self._streams.get(key) is stream:
            del self._streams[key]
        self._finished.pop(stream, None)
        stream.release()

    def note_finished(self, stream: Stream) -> None:
        """Note that a stream has ended: its memory may be reclaimed."""
        self._finished[stream] = None

    def _spare(self, nbytes: int) -> None:
        """Release about `nbytes` bytes of memory: drop unread finished streams, oldest first."""
        unread = [stream for stream in self._finished if not stream.num_readers]
        for stream in unread:
            if nbytes <= 0:
                break
            nbytes -= stream.nbytes
            self.forget(stream)

    def drain(self) -> None:
        """Stop keeping streams without a reader: end them now, and later ones at once."""
        self.draining = True
        for stream in list(self._streams.values()):
            stream.start_grace()

    async def close(self) -> None:
        """End all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            self.forget(stream)


class Stream:
    """Events of one answer so far; each has an ID and a number, counted from 0.

    Args:
        registry: registry that holds the stream.
        name, api_key, events, deadline: see `StreamRegistry.open`.

    Attributes:
        task: task that makes the events.
        finished: True if the last event exists.
        num_readers: number of connections that read the stream.
        nbytes: bytes of memory that it occupies.
    """

    def __init__(
        self,
        registry: StreamRegistry,
        name: str,
        api_key: str | None,
        events: Events,
        deadline: float | None,
    ) -> None:
        self.name = name
        self.api_key = api_key
        self.finished = False
        self.num_readers = 0
        self.nbytes = 0
        self._registry = registry
        self._id = name.encode()
        self._events: list[bytes] = []
        self._first = 0
        """Number of the first event in `_events`."""
        self._latest = self._recent = 0
        """First event numbers of the last two batches, which readers are about to receive."""
        self._error: Exception | None = None
        """Error that ended the stream before its first event."""
        self._grown = asyncio.Event()
        self._left = asyncio.Event()
        """Event that is set when the grace has passed without a reader."""
        self._timer = asyncio.get_running_loop().call_later(registry.grace, self._leave)
        self.task = asyncio.create_task(self._make(events, deadline))

    @property
    def num_events(self) -> int:
        """Number of events so far, dropped ones included."""
        return self._first + len(self._events)

    def check(self, number: int, param: str) -> None:
        """Check that a reader can start at event `number`.

        Raises:
            RequestError: the event is neither stored nor the next one; `param` is the field.
        """
        if not self._first <= number <= self.num_events:
            raise RequestError(
                f"{param}: the next event cannot be number {show(number)}; the stream has those "
                f"from {self._first} to {self.num_events - 1}.",
                param,
                "event_not_found",
            )

    async def read(self, number: int) -> Events:
        """Yield the events from `number` on, [DONE] included, as they are made.

        Raises:
            RequestError: the reader is so late that the next event has been dropped.
            Exception: the error that ended the stream before its first event.
        """
        self.num_readers += 1
        self._timer.cancel()
        try:
            while True:
                grown = self._grown
                self.check(number, "Last-Event-ID")
                piece = self._piece(number)
                if piece:
                    number += len(piece)
                    yield piece
                elif self._error is not None:
                    raise self._error
                elif self.finished:
                    return
                else:
                    await grown.wait()
        finally:
            self.num_readers -= 1
            self.start_grace()

    def start_grace(self) -> None:
        """Start the grace if the stream has no reader; a draining server grants none."""
        if not self.num_readers:
            self._timer.cancel()
            delay = 0.0 if self._registry.draining else self._registry.grace
            self._timer = asyncio.get_running_loop().call_later(delay, self._leave)

    def release(self) -> None:
        """Release the memory; current readers can continue."""
        self._timer.cancel()
        if self.nbytes:
            self._registry.memory.used -= self.nbytes
            self.nbytes = 0

    def _leave(self) -> None:
        self._left.set()
        self._registry.forget(self)

    async def _wait_until_left(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _make(self, events: Events, deadline: float | None) -> None:
        """Store the events until they end, fail, or the grace passes without a reader."""

        async def take_in() -> None:
            async with aclosing(events):
                async for piece in events:
                    self._append(piece)

        last = [DONE]
        try:
            await self._registry.run(self._wait_until_left, take_in(), deadline)
        except Exception as failure:
            error = failure
            if isinstance(failure, ClientDisconnectError):  # for a reader that was just too late
                error = UnavailableError("The stream has been dropped; send the request again.")
            if not self.num_events:
                # Readers return an ordinary error answer; no event exists to resume from.
                self._error = error
                if not self.num_readers:
                    log_unexpected(error)
                self._registry.forget(self)
                self._wake()
                return
            log_unexpected(error)
            last = [error_event(error), DONE]
        self.finished = True
        self._append(last)
        self._registry.note_finished(self)
        if self._left.is_set():  # it was dropped before, and has grown since
            self._registry.forget(self)

    def _append(self, events: list[bytes]) -> None:
        new = [
            b"id: %b:%d\n%b" % (self._id, number, event)
            for number, event in enumerate(events, self.num_events)
        ]
        memory = self._registry.memory
        self._recent, self._latest = self._latest, self.num_events
        size = sum(map(_size, new)) + (0 if self.nbytes else _RECORD)
        self._events += new
        self.nbytes += size
        memory.used += size
        memory.make_room()
        self._shorten()
        self._wake()

    def _shorten(self) -> None:
        """Drop the oldest events if memory is short."""
        memory = self._registry.memory
        limit = min(memory.limit // _SHARE, self.nbytes - (memory.used - memory.limit))
        limit = max(limit, _NEWEST)
        if self.nbytes <= limit:
            return
        limit -= limit // 8  # drop many at once: each deletion moves the rest
        kept, count = self.nbytes, 0
        while kept > limit and self._first + count < self._recent:
            kept -= _size(self._events[count])
            count += 1
        del self._events[:count]
        self._first += count
        memory.used -= self.nbytes - kept
        self.nbytes = kept

    def _piece(self, number: int) -> list[bytes]:
        """Return the next events to send, about `_PIECE` bytes."""
        piece: list[bytes] = []
        size = 0
        while size < _PIECE and number < self.num_events:
            piece.append(self._events[number - self._first])
            size += len(piece[-1])
            number += 1
        return piece

    def _wake(self) -> None:
        """Wake the readers."""
        self._grown.set()
        self._grown = asyncio.Event()


def _size(event: bytes) -> int:
    return len(event) + _EVENT
