"""How one of several front ends reaches the engines: by way of their `Coordinator`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.engine import wire
from octavo.engine.core_launcher import IpcChannel
from octavo.engine.mp_client import AsyncMPClient
from octavo.errors import EngineDeadError
from octavo.messages import EngineCoreOutputs

# Between two signs of life.
ALIVE_SECONDS = 0.5
# The coordinator's own call: all that front ends count, beside what the engines do.
PAGES = "pages"


class CoordinatorProcess:
    """See `EngineProcess`: the coordinator, which is this process' parent.

    Args:
        input_address: where it takes messages of this front end.
        output_address: where this front end takes its.
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        self.pid = os.getppid()
        self._addresses = input_address, output_address
        self._killed_for: str | None = None

    def open_channel(self) -> IpcChannel:
        """See `EngineProcess`."""
        return IpcChannel(*self._addresses)

    def describe_exit(self) -> str | None:
        """See `EngineProcess`."""
        if self._killed_for is None and os.getppid() != self.pid:
            return "the server's first process has ended"
        return self._killed_for

    def kill(self, reason: str) -> None:
        """Has nothing more to do with it: it serves others, too."""
        self._killed_for = self._killed_for or reason

    def shutdown(self, timeout: float = 5.0) -> None:
        """See `EngineProcess`: it ends by itself."""


class FrontEndClient(AsyncMPClient):
    """See `WatchedClient`: the engines are watched by the coordinator.

    Args:
        process: the coordinator.
        render: makes the page of this front end's metrics; called in another thread.
    """

    def __init__(self, process: CoordinatorProcess, render: Callable[[], bytes]) -> None:
        super().__init__(process)
        self._render = render
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
        if not self._tasks:
            self._begin(self._tell_alive())
        return await super().get_output()

    async def pages(self) -> list[bytes]:
        """The pages of metrics of all front ends, this one's included, and of the coordinator."""
        return [page.encode() for page in await self.call_utility(PAGES)]

    def close(self) -> None:
        """See `WatchedClient`."""
        for task in self._tasks:
            task.cancel()
        super().close()

    def _take(self, kind: bytes, payload: bytes) -> EngineCoreOutputs | None:
        if kind == wire.STATE:
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

    async def _tell_alive(self) -> None:
        while True:
            await self._channel.send(wire.ALIVE, b"")
            await asyncio.sleep(ALIVE_SECONDS)

    async def _send_page(self) -> None:
        page = await asyncio.to_thread(self._render)
        with contextlib.suppress(EngineDeadError):
            await self._channel.send(wire.PAGE, page)
