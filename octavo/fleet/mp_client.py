"""How a front end reaches an engine core in another process: behind ZMQ."""

from __future__ import annotations

import asyncio
import itertools
from functools import cached_property
from typing import Any, Protocol

import msgspec

from octavo.engine import wire
from octavo.errors import EngineDeadError, EngineStoppedError, make_error
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, UtilityCall, UtilityResult

# How long the process' end may go unnoticed.
_LOOK_SECONDS = 0.1


class Channel(Protocol):
    """Messages to an engine process and from it, each with its kind."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        ...

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Sends; what the process is not there for yet waits for it."""
        ...

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """The next message; None if none came within that time."""
        ...

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """The next message if there is one."""
        ...

    def close(self) -> None:
        """Closes it. May be called twice."""
        ...


class EngineProcess(Protocol):
    """An engine core's process, here or on another machine; see `CoreProcess`."""

    @property
    def pid(self) -> int:
        """Its number; -1: it is on another machine."""
        ...

    def open_channel(self) -> Channel:
        """Opens what it is talked to by.

        Raises:
            OSError: the system has no room for sockets.
        """
        ...

    def describe_exit(self) -> str | None:
        """How it ended, for people; None while it runs."""
        ...

    @property
    def was_stopped(self) -> bool:
        """Whether it was ended because a signal such as SIGSTOP held it."""
        ...

    def kill(self, reason: str) -> None:
        """Ends it at once; `describe_exit` will say why."""
        ...

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends it: asks it to, and after `timeout` seconds makes it. May be called twice."""
        ...


class AsyncMPClient:
    """See `EngineClient`: the core is in another process.

    May be made before there is an event loop; all else belongs to one.

    Args:
        process: that one.

    Raises:
        OSError: the system has no room for sockets.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._channel = process.open_channel()
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs_decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._next: tuple[bytes, bytes] | None = None
        """A message that was received and is not taken in yet."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()

    @cached_property
    def ready(self) -> asyncio.Future[wire.CoreReady]:
        """Result once the model is loaded; `EngineDeadError` if the start failed."""
        return asyncio.get_running_loop().create_future()

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`; with the process' end, waiting for outputs ends too."""
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
                # One on another machine may be anything that has the key: others must go on.
                self.process.kill("the engine sent what is no message of its kind")
                raise EngineDeadError(f"the engine cannot be understood: {error}") from error
            if outputs is not None:
                return outputs

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """See `WatchedClient`."""
        if self._next is None and not self._channel.closed:
            self._next = self._channel.receive_nowait()
        if self._next is None or self._next[0] != wire.OUTPUTS:
            return None
        try:
            outputs = self._outputs_decoder.decode(self._next[1])
        except msgspec.DecodeError:
            return None  # `get_output` will say so
        self._next = None
        return outputs

    def _take(self, kind: bytes, payload: bytes) -> EngineCoreOutputs | None:
        """Takes in a message; returns a step's outputs."""
        if kind == wire.OUTPUTS:
            return self._outputs_decoder.decode(payload)
        if kind == wire.READY:
            self.ready.set_result(msgspec.msgpack.decode(payload, type=wire.CoreReady))
        elif kind == wire.RESULT:
            self._finish_call(msgspec.msgpack.decode(payload, type=UtilityResult))
        elif kind == wire.DEAD:
            dead = msgspec.msgpack.decode(payload, type=wire.CoreDead)
            raise _death(dead.error, dead.stopped)
        return None

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`."""
        await self._send(wire.ADD, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        if request_ids:
            await self._send(wire.ABORT, request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._send(wire.UTILITY, UtilityCall(call_id, method, list(args)))
        return await future

    def fail_calls(self, error: Exception) -> None:
        """Fails everything that waits for an answer of the core."""
        for future in [self.ready, *self._calls.values()]:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    @property
    def closed(self) -> bool:
        """Whether it was closed or shut down."""
        return self._channel.closed

    async def shutdown(self, timeout: float = 5.0) -> None:
        """See `EngineClient`.

        Args:
            timeout: seconds that the process gets to end in order.
        """
        self.close()
        await asyncio.to_thread(self.process.shutdown, timeout)

    def close(self) -> None:
        """Closes the channel. May be called twice."""
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
