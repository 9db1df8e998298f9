"""Engine cores in other processes for callers without an event loop."""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from octavo.fleet.data_parallel import DataParallelClient
from octavo.fleet.supervisor import Supervisor
from octavo.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.plan.memory_plan import MemoryPlan

T = TypeVar("T")


class IsolatedClient:
    """See `EngineClient`: one of several engines or of one, on a thread of its own.

    The caller blocks meanwhile, and the event loop there runs only while somebody waits here: so
    these coroutines never wait, as those of `InprocClient`, and nothing happens to the front end's
    records behind its back. Engines compute all the time.

    Args:
        make: makes the client whose engines are to be talked to.

    Raises:
        EngineDeadError: the model cannot be loaded.
    """

    def __init__(self, make: Callable[[], Supervisor | DataParallelClient]) -> None:
        self._kept: deque[EngineCoreOutputs] = deque()
        self._reading: asyncio.Task[EngineCoreOutputs] | None = None
        """The next outputs: never cancelled half-way, or a dead engine's requests might be lost."""
        self._client = make()
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1, "octavo-engines")
        # For a script that ends without `shutdown`; the system ends the engines then.
        self._at_exit = atexit.register(partial(_cancel_tasks, self._loop))

        async def start() -> MemoryPlan:
            return (await self._read_until(self._client.ready)).plan

        try:
            self.memory_plan = self._wait(start())
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """The engine processes' numbers."""
        return self._client.pids

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`."""
        if self._kept:
            return self._kept.popleft()
        return self._wait(self._read())

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`."""
        self._wait(self._client.add_request(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        if request_ids and not self._loop.is_closed():
            self._wait(self._client.abort_requests(request_ids))

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`."""

        async def call() -> Any:
            return await self._read_until(self._client.call_utility(method, *args))

        return self._wait(call())

    async def shutdown(self) -> None:
        """See `EngineClient`."""
        if not self._loop.is_closed():
            self._end()

    async def _read(self) -> EngineCoreOutputs:
        reading = self._begin_to_read()
        await asyncio.wait({reading})
        self._reading = None
        return reading.result()

    async def _read_until(self, answer: Awaitable[T]) -> T:
        """The answer, which comes among the outputs: these are kept."""
        wanted = asyncio.ensure_future(answer)
        try:
            while not wanted.done():
                reading = self._begin_to_read()
                await asyncio.wait({wanted, reading}, return_when="FIRST_COMPLETED")
                if reading.done():
                    self._reading = None
                    self._kept.append(reading.result())
        finally:
            wanted.cancel()  # if there is no engine any more, nobody will answer
        return wanted.result()

    def _begin_to_read(self) -> asyncio.Task[EngineCoreOutputs]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._client.get_output())
        return self._reading

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what runs on the thread; an interrupt (Ctrl-C) ends it there, too."""
        task = self._loop.create_task(work)  # the loop stands still
        done = self._thread.submit(self._loop.run_until_complete, task)
        try:
            return done.result()
        finally:
            if not done.done():
                self._loop.call_soon_threadsafe(task.cancel)
                wait({done})

    def _end(self) -> None:
        async def end() -> None:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait({self._reading})
            await self._client.shutdown()
            await asyncio.get_running_loop().shutdown_default_executor()

        try:
            self._wait(end())
        finally:
            self._thread.shutdown()
            self._loop.close()
            atexit.unregister(self._at_exit)


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still waits in a loop that runs no more; asyncio would log each task."""
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
