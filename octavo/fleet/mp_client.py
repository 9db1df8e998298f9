"""Client of an engine core in another process, by ZMQ."""

from __future__ import annotations

import asyncio
import itertools
from functools import cached_property
from typing import Any, Protocol

import msgspec

from octavo.engine import core_messages
from octavo.engine.kept_items import RESET_ITEMS, ItemRecord
from octavo.errors import EngineDeadError, EngineStoppedError, make_error
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, UtilityCall, UtilityResult

# Interval of checks for the process' end.
_LOOK_SECONDS = 0.1


class Channel(Protocol):
    """Message channel to and from an engine process; each message has a kind."""

    @property
    def closed(self) -> bool:
        """True after `close`."""
        ...

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a message; it is queued until the process is ready."""
        ...

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """Return the next message, or None after `seconds` seconds."""
        ...

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """Return the next message if one has arrived."""
        ...

    def close(self) -> None:
        """Close the channel. May be called twice."""
        ...


class EngineProcess(Protocol):
    """Process of an engine core, here or on another machine; see `CoreProcess`."""

    @property
    def pid(self) -> int:
        """Process id; -1 if it is on another machine."""
        ...

    def open_channel(self) -> Channel:
        """Open the channel to the process.

        Raises:
            OSError: the system lacks resources for sockets.
        """
        ...

    def describe_exit(self) -> str | None:
        """Describe how the process ended; return None while it runs."""
        ...

    @property
    def was_stopped(self) -> bool:
        """True if it was killed as a victim, or because a signal such as SIGSTOP had stopped it."""
        ...

    def kill(self, reason: str, *, is_victim: bool = False) -> None:
        """Kill the process at once, for a reason that `describe_exit` reports.

        Args:
            reason: the reason.
            is_victim: True if neither the process nor a request is the cause.
        """
        ...

    def shutdown(self, timeout: float = 5.0) -> None:
        """Request the process' end, and kill it after `timeout` seconds. May be called twice."""
        ...


class AsyncMPClient:
    """Client of a core in another process.

    It may be created before there is an event loop; all other methods need one.

    Args:
        process: the process.

    Raises:
        OSError: the system lacks resources for sockets.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._channel = process.open_channel()
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs_decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._next: tuple[bytes, bytes] | None = None
        """Message that was received and is not processed yet."""
        self._items = ItemRecord()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()

    @cached_property
    def ready(self) -> asyncio.Future[core_messages.CoreReady]:
        """Future that resolves once the model is loaded; `EngineDeadError` if the start failed."""
        return asyncio.get_running_loop().create_future()

    async def get_output(self) -> EngineCoreOutputs:
        """Return the next step's outputs; raise when the process ends."""
        while True:
            message, self._next = self._next, None
            message = message or await self._channel.receive(_LOOK_SECONDS)
            if message is None:
                ended = self.process.describe_exit()
                if ended is None:
                    continue
                message = await self._channel.receive(0.0)
                if message is None:
                    raise _death(ended, self.process.was_stopped)
            try:
                outputs = self._take(*message)
            except (msgspec.DecodeError, asyncio.InvalidStateError) as error:
                # An engine on another machine may be any program with the key: the others must
                # continue.
                self.process.kill("the engine sent an invalid message")
                raise EngineDeadError(f"the engine sent an invalid message: {error}") from error
            if outputs is not None:
                return outputs

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """Implement `WatchedClient`."""
        if self._next is None and not self._channel.closed:
            self._next = self._channel.receive_nowait()
        if self._next is None or self._next[0] != core_messages.OUTPUTS:
            return None
        try:
            outputs = self._outputs_decoder.decode(self._next[1])
        except msgspec.DecodeError:
            return None  # `get_output` will report it
        self._next = None
        return outputs

    def _take(self, kind: bytes, payload: bytes) -> EngineCoreOutputs | None:
        """Process a message; return a step's outputs."""
        if kind == core_messages.OUTPUTS:
            return self._outputs_decoder.decode(payload)
        if kind == core_messages.READY:
            ready = msgspec.msgpack.decode(payload, type=core_messages.CoreReady)
            self._items.max_nbytes = ready.kept_items_nbytes
            self.ready.set_result(ready)
        elif kind == core_messages.RESULT:
            self._finish_call(msgspec.msgpack.decode(payload, type=UtilityResult))
        elif kind == core_messages.DEAD:
            dead = msgspec.msgpack.decode(payload, type=core_messages.CoreDead)
            raise _death(dead.error, dead.stopped)
        return None

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Implement `EngineClient`."""
        if not request.mm_features or not self._items.max_nbytes:
            await self._send(core_messages.ADD, request)
            return
        message = self._items.pack(request)
        payload = self._encoder.encode(message)
        self._items.note(message)
        await self._channel.send(core_messages.ITEMS, payload)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        if request_ids:
            await self._send(core_messages.ABORT, request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Implement `EngineClient`."""
        if method == RESET_ITEMS:
            self._items.clear()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._send(core_messages.UTILITY, UtilityCall(call_id, method, list(args)))
        return await future

    def fail_calls(self, error: Exception) -> None:
        """Fail all pending calls."""
        for future in [self.ready, *self._calls.values()]:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    @property
    def closed(self) -> bool:
        """True after `close` or `shutdown`."""
        return self._channel.closed

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Implement `EngineClient`.

        Args:
            timeout: seconds for the process to end in order.
        """
        self.close()
        await asyncio.to_thread(self.process.shutdown, timeout)

    def close(self) -> None:
        """Close the channel. May be called twice."""
        self._channel.close()

    async def _send(self, kind: bytes, message: object) -> None:
        await self._channel.send(kind, self._encoder.encode(message))

    def _finish_call(self, result: UtilityResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(make_error(result.error_kind, result.error))
        else:
            future.set_result(result.value)


def _death(how: str, was_stopped: bool) -> EngineDeadError:
    return EngineStoppedError(how) if was_stopped else EngineDeadError(how)
