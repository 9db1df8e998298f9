"""Client of engines that divide the experts of a model, and whose number changes.

Another number of engines divides the experts in another way. So it needs a new group of engines,
which is loaded beside the present group. The present group serves meanwhile. Then the new group
continues all requests from their tokens so far, as after an engine's death, and the old group is
ended. If the new group cannot be loaded, nothing changes for the present one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from octavo.engine.core_messages import CoreReady
from octavo.errors import (
    OctavoError,
    ScalingBusyError,
    ScalingError,
    StepFailedError,
    reason_of,
)
from octavo.fleet.data_parallel import DataParallelClient
from octavo.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.plan.memory_plan import MemoryPlan
from octavo.system import clock
from octavo.system.device import resident_memory

logger = logging.getLogger(__name__)

# Most time for a new group to load: it may have to pack the weights.
_START_SECONDS = 600.0


class MakeGroup(Protocol):
    """Function that starts a group of engines, and returns while the engines still load."""

    def __call__(
        self, size: int, plan: MemoryPlan | None = None, reserved: int = 0
    ) -> DataParallelClient:
        """Start a group.

        Args:
            size: number of engines.
            plan: memory plan of the present group: the new group gets the same KV cache and
                context. None: make a new plan.
            reserved: bytes of the free memory that the present group may still need.

        Raises:
            ConfigError: the settings do not allow it.
            OSError: the system lacks resources for a process.
        """
        ...


class ElasticGroup:
    """Client of a group of engines, which another group may replace.

    It may be created before there is an event loop; all other methods need one.

    Args:
        make: starts a group.
        size: number of engines of the first group.
        unfinished: returns the live requests, in order of arrival, as another engine should receive
            them.
    """

    def __init__(
        self, make: MakeGroup, size: int, unfinished: Callable[[], list[EngineCoreRequest]]
    ) -> None:
        self._make, self._size, self._unfinished = make, size, unfinished
        self._group = make(size)
        self._new: DataParallelClient | None = None
        """Group that is being loaded."""
        self._is_loaded = False
        """True if the new group is loaded."""
        self._change: asyncio.Future[None] | None = None
        """Future that resolves when the new group has replaced the present one."""
        self._old: DataParallelClient | None = None
        """Group whose requests are being moved."""
        self._read: asyncio.Task[EngineCoreOutputs] | None = None
        """Task that reads the present group's next outputs."""
        self._idle: deque[int] = deque()
        """Engines whose statistics are still those of the old group. `get_output` returns empty
        statistics for them."""
        self._scaling = asyncio.Lock()

    async def get_output(self) -> EngineCoreOutputs:
        """Return the next outputs; first move all requests to a new group that is loaded.

        The caller must have processed all earlier outputs, so that the records of the requests are
        complete.
        """
        while True:
            if self._read is None and self._is_loaded:
                await self._replace()
            if self._idle:
                return EngineCoreOutputs([], SchedulerStats(), clock.now(), self._idle.popleft())
            if self._read is None:
                self._read = asyncio.create_task(self._group.get_output())
            await asyncio.wait({self._read})
            read, self._read = self._read, None
            if not read.cancelled():
                return read.result()

    async def _replace(self) -> None:
        """Let the new group continue all requests."""
        assert self._new is not None
        assert self._change is not None
        self._old, self._group, self._new, self._is_loaded = self._group, self._new, None, False
        count = 0
        for request in self._unfinished():
            # The request may have ended while another one was sent.
            if any(self._old.engine_of(i) is not None for i in request.child_ids):
                await self._group.adopt(request, self._old.deaths_of(request.request_id))
                count += len(request.child_ids)
        self._old = None
        self._idle.extend(range(min(self._size, len(self._group.pids))))
        logger.info("the new group of engines continues all requests (requests: %d)", count)
        self._change.set_result(None)

    @property
    def scaling(self) -> bool:
        """True while another group is loaded, or the present one is ended."""
        return self._scaling.locked()

    async def scale(self, size: int) -> None:
        """Replace the group by one of `size` engines while requests continue.

        Raises:
            ScalingError: the group cannot be started; then nothing has changed.
            ScalingBusyError: another change is in progress.
        """
        if self._scaling.locked():
            raise ScalingBusyError
        async with self._scaling:
            plan, old = (await asyncio.shield(self._group.ready)).plan, self._group
            if size == self._size:
                return
            try:
                self._new = new = self._make(size, plan, self._reserved(plan))
            except (OctavoError, OSError) as error:
                raise _failure(size, reason_of(error)) from error
            self._change = asyncio.get_running_loop().create_future()
            try:
                await _load(new, size)
            except ScalingError:
                self._new = None
                await new.shutdown()
                raise
            self._is_loaded = True
            if self._read is not None:
                self._read.cancel()
            await self._change
            self._size = size
            old.fail_calls(StepFailedError("The engines were replaced; try again."))
            await old.shutdown()

    def _reserved(self, plan: MemoryPlan) -> int:
        """Return the planned bytes of the present engines that are not resident yet."""
        resident = sum(resident_memory(pid) or 0 for pid in self._group.pids)
        return max(0, self._size * plan.steady - resident)

    @property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Future that resolves once all engines of the group are loaded."""
        return self._group.ready

    @property
    def up(self) -> bool:
        """Implement `WatchedClient`."""
        return self._group.up

    @property
    def missing(self) -> list[int]:
        """Implement `WatchedClient`."""
        return self._group.missing

    @property
    def down(self) -> dict[int, str]:
        """Implement `WatchedClient`."""
        return self._group.down

    @property
    def pids(self) -> list[int]:
        """Ids of the engine processes."""
        return self._group.pids

    @property
    def elastic(self) -> ElasticGroup:
        """This client."""
        return self

    async def pages(self) -> list[bytes]:
        """Return []: there is no other front end."""
        return []

    def family_of(self, index: int) -> list[int]:
        """Implement `WatchedClient`."""
        return self._group.family_of(index)

    def engine_of(self, request_id: str) -> int | None:
        """Implement `WatchedClient`."""
        return self._group.engine_of(request_id)

    def holder_of(self, request_id: str) -> tuple[int, int] | None:
        """Implement `WatchedClient`."""
        return self._group.holder_of(request_id)

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """Implement `WatchedClient`."""
        return self._group.get_output_nowait()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Implement `EngineClient`."""
        await self._group.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        for group in filter(None, (self._old, self._group)):
            await group.abort_requests(request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of all engines; see `DataParallelClient.call_utility`."""
        return await self._group.call_utility(method, *args)

    def fail_calls(self, error: Exception) -> None:
        """Fail all pending and future calls."""
        for group in filter(None, (self._new, self._group)):
            group.fail_calls(error)
        if self._change is not None and not self._change.done():
            self._change.set_exception(error)
            self._change.exception()  # marks it as retrieved

    async def shutdown(self) -> None:
        """Implement `EngineClient`."""
        if self._read is not None:
            self._read.cancel()
            await asyncio.wait({self._read})
        groups = filter(None, (self._new, self._old, self._group))
        await asyncio.gather(*(group.shutdown() for group in groups))

    def close(self) -> None:
        """Shut down without an event loop."""
        for group in filter(None, (self._new, self._old, self._group)):
            group.close()


async def _load(group: DataParallelClient, size: int) -> None:
    """Wait until a new group is loaded.

    Raises:
        ScalingError: it cannot be loaded, or not in time.
    """
    reading = asyncio.create_task(_read_on(group))
    ends: set[asyncio.Future[Any]] = {reading, group.ready}
    try:
        await asyncio.wait(ends, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()
        await asyncio.wait({reading})
    error = None if reading.cancelled() else reading.exception()
    if error is None and group.ready.done():
        error = group.ready.exception()
    elif error is None:
        error = TimeoutError(f"the model was not loaded within {_START_SECONDS:.0f} s")
    if error is not None:
        raise _failure(size, str(error)) from error


async def _read_on(group: DataParallelClient) -> None:
    """Read the outputs of a group without requests, so that its dead engines are replaced.

    Raises:
        EngineDeadError: an engine cannot be loaded.
    """
    while True:
        await group.get_output()


def _failure(size: int, reason: str) -> ScalingError:
    return ScalingError(f"{size} engines could not be started: {reason.rstrip('.')}.")
