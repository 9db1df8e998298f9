"""Engine cores in other processes for callers without an event loop."""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.data_parallel import DataParallelClient
from octavo.fleet.start import share_cores
from octavo.fleet.supervisor import Supervisor
from octavo.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.plan.memory_plan import MemoryPlan

T = TypeVar("T")


class IsolatedClient:
    """Client of engines in other processes that runs its event loop on a separate thread.

    The loop only runs while the caller waits in one of these methods. So the coroutines never wait,
    as those of `InprocClient`, and the front end's records never change concurrently. The engines
    compute all the time.

    Args:
        make: makes the inner client.

    Raises:
        EngineDeadError: the model cannot be loaded.
    """

    def __init__(self, make: Callable[[], Supervisor | DataParallelClient]) -> None:
        self._kept: deque[EngineCoreOutputs] = deque()
        self._reading: asyncio.Task[EngineCoreOutputs] | None = None
        """Task that reads the next outputs; never cancelled, or requests of a dead engine might be
        lost."""
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
        """Ids of the engine processes."""
        return self._client.pids

    async def get_output(self) -> EngineCoreOutputs:
        """Implement `EngineClient`."""
        if self._kept:
            return self._kept.popleft()
        return self._wait(self._read())

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Implement `EngineClient`."""
        self._wait(self._client.add_request(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        if request_ids and not self._loop.is_closed():
            self._wait(self._client.abort_requests(request_ids))

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Implement `EngineClient`."""

        async def call() -> Any:
            return await self._read_until(self._client.call_utility(method, *args))

        return self._wait(call())

    async def shutdown(self) -> None:
        """Implement `EngineClient`."""
        if not self._loop.is_closed():
            self._end()

    async def _read(self) -> EngineCoreOutputs:
        reading = self._begin_to_read()
        await asyncio.wait({reading})
        self._reading = None
        return reading.result()

    async def _read_until(self, answer: Awaitable[T]) -> T:
        """Wait for an answer that arrives among outputs, which are kept."""
        wanted = asyncio.ensure_future(answer)
        try:
            while not wanted.done():
                reading = self._begin_to_read()
                await asyncio.wait({wanted, reading}, return_when="FIRST_COMPLETED")
                if reading.done():
                    self._reading = None
                    self._kept.append(reading.result())
        finally:
            wanted.cancel()  # without an engine no answer would arrive
        return wanted.result()

    def _begin_to_read(self) -> asyncio.Task[EngineCoreOutputs]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._client.get_output())
        return self._reading

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread and return its result; Ctrl-C cancels it there, too."""
        task = self._loop.create_task(work)  # the loop is not running
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


def start_isolated(
    config: EngineConfig,
    path: Path,
    unfinished: Callable[[], list[EngineCoreRequest]],
    *,
    default_batched_tokens: int,
    log_level: str,
) -> IsolatedClient:
    """Start engine cores in other processes; return when the model is loaded.

    Args:
        config: the settings.
        path: the model's folder.
        unfinished: see `Supervisor`.
        default_batched_tokens: token budget of a step if the settings have none.
        log_level: minimum level that the processes log.
    """
    config = share_cores(config)
    launcher = CoreLauncher(
        config,
        path,
        default_batched_tokens=default_batched_tokens,
        request_memory=None,
        warm_spare=False,
        log_level=log_level,
        log_format="text",
    )

    def make() -> Supervisor | DataParallelClient:
        if config.parallel.data_parallel_size == 1:
            return Supervisor(launcher, unfinished, max_restarts=5, progress_timeout=60.0)
        return DataParallelClient(
            launcher, unfinished, config=config, max_restarts=5, progress_timeout=60.0
        )

    return IsolatedClient(make)


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still waits in a loop that runs no more; asyncio would log each task."""
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
