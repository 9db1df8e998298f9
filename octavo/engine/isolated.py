"""An engine core in another process for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from octavo.engine.core_launcher import CoreLauncher
from octavo.engine.memory_plan import MemoryPlan
from octavo.engine.supervisor import Supervisor
from octavo.messages import EngineCoreOutputs, EngineCoreRequest

T = TypeVar("T")


class IsolatedClient:
    """See `EngineClient`: a `Supervisor` on a thread of its own; the caller blocks meanwhile.

    So its coroutines never wait, as those of `InprocClient`, and nothing happens to the front end's
    records but while the caller waits here.

    Args:
        launcher: starts the processes.
        unfinished: see `Supervisor`.
        max_restarts: see there.
        progress_timeout: see there.

    Raises:
        EngineDeadError: the model cannot be loaded.
    """

    def __init__(
        self,
        launcher: CoreLauncher,
        unfinished: Callable[[], list[EngineCoreRequest]],
        *,
        max_restarts: int,
        progress_timeout: float,
    ) -> None:
        self._kept: deque[EngineCoreOutputs] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="octavo-supervisor", daemon=True
        )
        self._thread.start()

        async def start() -> tuple[Supervisor, MemoryPlan]:
            supervisor = Supervisor(
                launcher,
                unfinished,
                max_restarts=max_restarts,
                progress_timeout=progress_timeout,
            )
            try:
                ready = await self._read_until(supervisor, supervisor.ready)
            except BaseException:
                await supervisor.shutdown()
                raise
            return supervisor, ready.plan

        try:
            self._supervisor, self.memory_plan = self._wait(start())
        except BaseException:
            self._end_loop()
            raise

    @property
    def pid(self) -> int:
        """The engine process' number."""
        return self._supervisor.pid

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`."""
        if self._kept:
            return self._kept.popleft()
        return self._wait(self._supervisor.get_output())

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`."""
        self._wait(self._supervisor.add_request(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        if request_ids and not self._loop.is_closed():
            self._wait(self._supervisor.abort_requests(request_ids))

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`."""
        supervisor = self._supervisor
        call = self._read_until(supervisor, supervisor.call_utility(method, *args))
        return self._wait(call)

    async def shutdown(self) -> None:
        """See `EngineClient`."""
        if not self._loop.is_closed():
            self._wait(self._supervisor.shutdown())
            self._end_loop()

    async def _read_until(self, supervisor: Supervisor, answer: Awaitable[T]) -> T:
        """The answer, which comes among the outputs: these are kept."""
        wanted = asyncio.ensure_future(answer)
        try:
            while not wanted.done():
                reading = asyncio.ensure_future(supervisor.get_output())
                await asyncio.wait({wanted, reading}, return_when="FIRST_COMPLETED")
                if reading.done():
                    self._kept.append(reading.result())
                reading.cancel()
        finally:
            wanted.cancel()  # if there is no engine any more, nobody will answer
        await supervisor.settle()
        return wanted.result()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what runs on the thread; an interrupt (Ctrl-C) ends it there, too."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
