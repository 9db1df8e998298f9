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
"""Whole server-sent events, as many at a time as there are."""

DONE = b"data: [DONE]\n\n"
# Bytes of a stream's records, and of an event's beside its text.
_RECORD = 6144
_EVENT = 48
# Of the memory for requests, the most that one stream's events take.
_SHARE = 16
# So many bytes of the newest events stay however little memory there is.
_NEWEST = 2**16
# A reader sends about so many bytes at once.
_PIECE = 2**16


class Run(Protocol):
    """`ServerState.run`."""

    def __call__(
        self, receive: Receive, work: Coroutine[object, object, None], deadline: float | None
    ) -> Coroutine[Any, Any, None]:
        """Does the work until the deadline, or until `receive` brings http.disconnect."""


class StreamRegistry:
    """The streams of one server that somebody may come back to.

    Args:
        grace: seconds that a stream without a reader is kept; 0: there are no such streams.
        run: does the work of a stream.
    """

    def __init__(self, grace: float, run: Run) -> None:
        self.grace = grace
        self.run = run
        self.draining = False
        self._memory: RequestMemory | None = None
        self._streams: dict[tuple[str | None, str], Stream] = {}
        self._finished: dict[Stream, None] = {}
        """Of these, those that have ended, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def memory(self) -> RequestMemory:
        """What the events are counted in; known once there is an engine."""
        assert self._memory is not None
        return self._memory

    @memory.setter
    def memory(self, memory: RequestMemory) -> None:
        self._memory = memory
        memory.spare = self._spare

    def __len__(self) -> int:
        """Streams that are kept, running or not."""
        return len(self._streams)

    def open(
        self, name: str, api_key: str | None, events: Events, deadline: float | None
    ) -> Stream | None:
        """Begins a stream.

        Args:
            name: id of the answer, printable ASCII.
            api_key: who may read it.
            events: what makes the events, without the last one ([DONE]).
            deadline: when they have to be finished, second of `time.monotonic`.

        Returns:
            None, and `events` untouched, if it would not be kept: without a grace, at the server's
            end, or if there is one of that name. The earlier one stays, so that nobody can put
            their own in its place.
        """
        if not self.grace or self.draining or (api_key, name) in self._streams:
            return None
        stream = self._streams[api_key, name] = Stream(self, name, api_key, events, deadline)
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        return stream

    def find(self, name: str, api_key: str | None) -> Stream:
        """The stream of that name.

        Raises:
            NotFoundError: there is none that this key may read.
        """
        stream = self._streams.get((api_key, name))
        if stream is not None:
            stream.start_grace()  # it will not be given up just before it is read
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
        """Lets go of a stream and its memory."""
        key = (stream.api_key, stream.name)
        if self._streams.get(key) is stream:
            del self._streams[key]
        self._finished.pop(stream, None)
        stream.release()

    def note_finished(self, stream: Stream) -> None:
        """From now on its memory is given up if it is needed."""
        self._finished[stream] = None

    def _spare(self, nbytes: int) -> None:
        """Gives up about `nbytes` of memory, of what was finished first."""
        unread = [stream for stream in self._finished if not stream.num_readers]
        for stream in unread:
            if nbytes <= 0:
                break
            nbytes -= stream.nbytes
            self.forget(stream)

    def drain(self) -> None:
        """From now on nobody can come back: streams without a reader end."""
        self.draining = True
        for stream in list(self._streams.values()):
            stream.start_grace()

    async def close(self) -> None:
        """Ends all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            self.forget(stream)


class Stream:
    """The events of one answer, as far as they are there; each has an id and a number from 0 on.

    Args:
        registry: whose it is.
        name, api_key, events, deadline: see `StreamRegistry.open`.

    Attributes:
        task: makes the events.
        finished: the last event is there.
        num_readers: connections that read it.
        nbytes: memory that it takes.
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
        """Number of the first one of `_events`."""
        self._latest = self._recent = 0
        """Numbers of the first ones of the last two batches, which readers are about to get."""
        self._error: Exception | None = None
        """What ended it before its first event."""
        self._grown = asyncio.Event()
        self._left = asyncio.Event()
        """Nobody has read it for the whole grace."""
        self._timer = asyncio.get_running_loop().call_later(registry.grace, self._leave)
        self.task = asyncio.create_task(self._make(events, deadline))

    @property
    def num_events(self) -> int:
        """Events so far, those that are forgotten included."""
        return self._first + len(self._events)

    def check(self, number: int, param: str) -> None:
        """Refuses to read from event `number` on.

        Raises:
            RequestError: with `param`; it is not one that is there or comes next.
        """
        if not self._first <= number <= self.num_events:
            raise RequestError(
                f"{param}: the next event cannot be number {show(number)}; the stream has those "
                f"from {self._first} to {self.num_events - 1}.",
                param,
                "event_not_found",
            )

    async def read(self, number: int) -> Events:
        """The events from `number` on, [DONE] included, as they come.

        Raises:
            RequestError: the reader is so late that events which it lacks had to be forgotten.
            Exception: what ended the stream before its first event.
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
        """Begins to wait for the next reader, if there is none: the grace, or not at all."""
        if not self.num_readers:
            self._timer.cancel()
            delay = 0.0 if self._registry.draining else self._registry.grace
            self._timer = asyncio.get_running_loop().call_later(delay, self._leave)

    def release(self) -> None:
        """Gives its memory back; whoever reads it reads on."""
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
        """Takes the events in until they end, fail, or nobody wants them."""

        async def take_in() -> None:
            async with aclosing(events):
                async for piece in events:
                    self._append(piece)

        last = [DONE]
        try:
            await self._registry.run(self._wait_until_left, take_in(), deadline)
        except Exception as failure:
            error = failure
            if isinstance(failure, ClientDisconnectError):  # for a reader that came just too late
                error = UnavailableError("The stream has been given up; send the request again.")
            if not self.num_events:
                # The readers' ordinary answer; there is nothing to come back to.
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
        if self._left.is_set():  # it was forgotten before, and has grown since
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
        """Forgets the oldest events for which there is no memory."""
        memory = self._registry.memory
        limit = min(memory.limit // _SHARE, self.nbytes - (memory.used - memory.limit))
        limit = max(limit, _NEWEST)
        if self.nbytes <= limit:
            return
        limit -= limit // 8  # many at once: each time the others move up
        kept, count = self.nbytes, 0
        while kept > limit and self._first + count < self._recent:
            kept -= _size(self._events[count])
            count += 1
        del self._events[:count]
        self._first += count
        memory.used -= self.nbytes - kept
        self.nbytes = kept

    def _piece(self, number: int) -> list[bytes]:
        """The next events to be sent, about `_PIECE` bytes of them."""
        piece: list[bytes] = []
        size = 0
        while size < _PIECE and number < self.num_events:
            piece.append(self._events[number - self._first])
            size += len(piece[-1])
            number += 1
        return piece

    def _wake(self) -> None:
        """Lets the readers go on."""
        self._grown.set()
        self._grown = asyncio.Event()


def _size(event: bytes) -> int:
    return len(event) + _EVENT
