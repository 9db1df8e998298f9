"""Connection of one of several front ends to the engines, by their `Coordinator`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.engine import core_messages
from octavo.errors import EngineDeadError, StepFailedError
from octavo.fleet.ipc_channel import IpcChannel
from octavo.fleet.mp_client import AsyncMPClient
from octavo.messages import EngineCoreOutputs, EngineCoreRequest

# Call of the coordinator itself: the metrics of all front ends, besides those of the engines.
PAGES = "pages"


def addresses_of(folder: str, life: int, number: int) -> tuple[str, str]:
    """Return the addresses where the coordinator and a front end receive messages.

    Args:
        folder: folder of the sockets.
        life: number of coordinators before this one.
        number: index of the front end.
    """
    return f"ipc://{folder}/{life}-in{number}", f"ipc://{folder}/{life}-out{number}"


class CoordinatorProcess:
    """Coordinator as an `EngineProcess`; the server's first process watches it.

    Args:
        folder: folder of the sockets.
        number: index of this front end.
        life: number of earlier coordinators.
    """

    def __init__(self, folder: str, number: int, life: int = 0) -> None:
        self.pid = os.getppid()
        self._folder, self._number = folder, number
        self._life = self._talked_to = life
        self._killed_for: str | None = None
        self.was_stopped = False
        """Always False; the first process checks for stops."""

    def replace(self) -> None:
        """Record that the first process has started another coordinator. Any thread may call it."""
        self._life += 1

    @property
    def replaced(self) -> bool:
        """True if there is a newer coordinator than the one at the end of the channel."""
        return self._life != self._talked_to

    def open_channel(self) -> IpcChannel:
        """Open a channel to the current coordinator, which may still be starting."""
        self._talked_to = self._life
        return IpcChannel(*addresses_of(self._folder, self._talked_to, self._number))

    def describe_exit(self) -> str | None:
        """Implement `EngineProcess`."""
        if os.getppid() != self.pid:
            return "the server's first process has ended"
        if self._killed_for is None and self.replaced:
            return "the process that has the engines has ended"
        return self._killed_for

    def kill(self, reason: str, *, is_victim: bool = False) -> None:
        """Drop the coordinator without killing it: it serves other front ends, too."""
        self._killed_for = self._killed_for or reason

    def shutdown(self, timeout: float = 5.0) -> None:
        """Do nothing: it ends by itself."""


class CoordinatorClient(AsyncMPClient):
    """Client of engines that the coordinator supervises.

    If another coordinator, with its own engines, has replaced a dead one, these engines receive the
    requests in flight with their tokens so far.

    Args:
        process: the coordinator.
        render: makes the page of this front end's metrics; called in another thread.
        unfinished: returns the live requests, in order of arrival, as other engines should receive
            them.
    """

    def __init__(
        self,
        process: CoordinatorProcess,
        render: Callable[[], bytes],
        unfinished: Callable[[], list[EngineCoreRequest]],
    ) -> None:
        super().__init__(process)
        self._coordinator = process
        self._render = render
        self._unfinished = unfinished
        self._state = core_messages.EnginesState()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        """True if an engine accepts requests now."""
        return self.ready.done() and self._state.up

    @property
    def missing(self) -> list[int]:
        """Indices of the engines without a node so far."""
        return self._state.missing

    @property
    def down(self) -> dict[int, str]:
        """Engines that are not serving, by index, with their state."""
        return self._state.down

    @property
    def elastic(self) -> None:
        """None: the coordinator has the engines."""

    def family_of(self, index: int) -> list[int]:
        """Return []: the coordinator watches the processes."""
        return []

    def engine_of(self, request_id: str) -> int | None:
        """Return None: only the coordinator knows the engine."""
        return None

    def holder_of(self, request_id: str) -> None:
        """Return None: only the coordinator knows the engines."""

    async def get_output(self) -> EngineCoreOutputs:
        """Implement `EngineClient`."""
        while True:
            try:
                return await super().get_output()
            except EngineDeadError:
                if not self._coordinator.replaced:
                    raise
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Send another coordinator the requests in flight."""
        self._channel.close()
        error = StepFailedError("The engines were started again before they answered; try again.")
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()
        self._state, self._next = core_messages.EnginesState(), None
        self._channel = self._coordinator.open_channel()
        for request in self._unfinished():
            await self.add_request(request)

    async def pages(self) -> list[bytes]:
        """Return the metrics pages of all front ends and of the coordinator."""
        return [page.encode() for page in await self.call_utility(PAGES)]

    def close(self) -> None:
        """Implement `WatchedClient`."""
        for task in self._tasks:
            task.cancel()
        super().close()

    def _take(self, kind: bytes, payload: bytes) -> EngineCoreOutputs | None:
        if kind == core_messages.READY and self.ready.done():
            pass  # repeated by replaced engines
        elif kind == core_messages.STATE:
            self._state = msgspec.msgpack.decode(payload, type=core_messages.EnginesState)
        elif kind == core_messages.PAGE:
            self._begin(self._send_page())
        else:
            return super()._take(kind, payload)
        return None

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_page(self) -> None:
        page = await asyncio.to_thread(self._render)
        with contextlib.suppress(EngineDeadError):
            await self._channel.send(core_messages.PAGE, page)
