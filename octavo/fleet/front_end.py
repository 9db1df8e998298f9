"""How one of several front ends reaches the engines: by way of their `Coordinator`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.engine import wire
from octavo.errors import EngineDeadError, StepFailedError
from octavo.fleet.core_launcher import IpcChannel
from octavo.fleet.mp_client import AsyncMPClient
from octavo.messages import EngineCoreOutputs, EngineCoreRequest

# The coordinator's own call: all that front ends count, beside what the engines do.
PAGES = "pages"


def addresses_of(folder: str, life: int, number: int) -> tuple[str, str]:
    """Where a coordinator takes a front end's messages, and where that takes its own.

    Args:
        folder: of the sockets.
        life: how many coordinators there were before.
        number: the front end's.
    """
    return f"ipc://{folder}/{life}-in{number}", f"ipc://{folder}/{life}-out{number}"


class CoordinatorProcess:
    """See `EngineProcess`: the coordinator, which the server's first process watches.

    Args:
        folder: of the sockets.
        number: this front end's.
        life: see `addresses_of`.
    """

    def __init__(self, folder: str, number: int, life: int = 0) -> None:
        self.pid = os.getppid()
        self._folder, self._number = folder, number
        self._life = self._talked_to = life
        self._killed_for: str | None = None
        self.was_stopped = False
        """See `EngineProcess`; the first process looks after that."""

    def replace(self) -> None:
        """The first process has started another one. May be called in any thread."""
        self._life += 1

    @property
    def replaced(self) -> bool:
        """Whether there is another one than that which the channel leads to."""
        return self._life != self._talked_to

    def open_channel(self) -> IpcChannel:
        """See `EngineProcess`; to the one that is there now, or will be at once."""
        self._talked_to = self._life
        return IpcChannel(*addresses_of(self._folder, self._talked_to, self._number))

    def describe_exit(self) -> str | None:
        """See `EngineProcess`."""
        if os.getppid() != self.pid:
            return "the server's first process has ended"
        if self._killed_for is None and self.replaced:
            return "the process that has the engines has ended"
        return self._killed_for

    def kill(self, reason: str) -> None:
        """Has nothing more to do with it: it serves others, too."""
        self._killed_for = self._killed_for or reason

    def shutdown(self, timeout: float = 5.0) -> None:
        """See `EngineProcess`: it ends by itself."""


class FrontEndClient(AsyncMPClient):
    """See `WatchedClient`: the engines are watched by the coordinator.

    Where another coordinator has taken the place of one that died, with engines of its own, these
    get the requests in flight with what they have.

    Args:
        process: the coordinator.
        render: makes the page of this front end's metrics; called in another thread.
        unfinished: the live requests, in order of arrival, as other engines are to get them.
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
        self._state = wire.EnginesState()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        """See `WatchedClient`."""
        return self.ready.done() and self._state.up

    @property
    def missing(self) -> list[int]:
        """See `WatchedClient`."""
        return self._state.missing

    @property
    def down(self) -> dict[int, str]:
        """See `WatchedClient`."""
        return self._state.down

    def family_of(self, index: int) -> list[int]:
        """See `WatchedClient`: the coordinator watches them."""
        return []

    def engine_of(self, request_id: str) -> int | None:
        """See `WatchedClient`: only the coordinator knows."""
        return None

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`."""
        while True:
            try:
                return await super().get_output()
            except EngineDeadError:
                if not self._coordinator.replaced:
                    raise
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Gives another coordinator the requests in flight."""
        self._channel.close()
        error = StepFailedError("The engines were started again before they answered; ask again.")
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()
        self._state, self._next = wire.EnginesState(), None
        self._channel = self._coordinator.open_channel()
        for request in self._unfinished():
            await self.add_request(request)

    async def pages(self) -> list[bytes]:
        """The pages of metrics of all front ends, this one's included, and of the coordinator."""
        return [page.encode() for page in await self.call_utility(PAGES)]

    def close(self) -> None:
        """See `WatchedClient`."""
        for task in self._tasks:
            task.cancel()
        super().close()

    def _take(self, kind: bytes, payload: bytes) -> EngineCoreOutputs | None:
        if kind == wire.READY and self.ready.done():
            pass  # other engines are, too
        elif kind == wire.STATE:
            self._state = msgspec.msgpack.decode(payload, type=wire.EnginesState)
        elif kind == wire.PAGE:
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
            await self._channel.send(wire.PAGE, page)
