"""Several engines with the whole model each, behind one front end: each request goes to one.

The first engine's memory plan is that of all. An answer depends on nothing but prompt, parameters
and seed, so when an engine dies its requests go on at another one at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.wire import CoreReady
from octavo.errors import ConfigError, EngineDeadError, NodeMissingError, ScalingError
from octavo.fleet.cluster import ClusterKey, Hub, RemoteLauncher
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.routing import Router
from octavo.fleet.supervisor import SUSPECT, Recovery, Supervisor
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from octavo.platforms.registry import get_platform
from octavo.system import clock
from octavo.system.device import cpu_memory, num_cpus, numa_cpus

logger = logging.getLogger(__name__)

# How long the nodes may take to join, after the start.
JOIN_SECONDS = 600.0
# How often it is looked whether that is over.
_JOIN_POLL = 1.0


def share_cores(config: EngineConfig) -> EngineConfig:
    """The settings of each engine: unless they say how many threads it has, its share of the cores.

    Raises:
        ConfigError: the device cannot be shared.
    """
    size, device = config.parallel.data_parallel_size, config.device
    platform = get_platform(device.device)
    if size > 1 and not platform.shared:
        raise ConfigError(
            f"data_parallel_size={size} is not supported on device={platform.name}, where an "
            "engine takes all of the device; start a server for each, and a load balancer in front."
        )
    if size == 1:
        return config
    cores = num_cpus() if device.numa_node is None else len(numa_cpus(device.numa_node))
    local = config.parallel.num_local_engines
    workers = local * config.world_size
    threads = device.num_threads or max(1, cores // workers)
    if workers * threads > cores:
        logger.warning(
            "%d processes with %d threads each are more than the %d cores there are for them: they "
            "wait for each other, and every step takes longer",
            workers,
            threads,
            cores,
        )
    replace = msgspec.structs.replace
    return replace(config, device=replace(device, num_threads=threads))


class DataParallelClient:
    """See `EngineClient`: several engines, each watched and replaced by a `Supervisor`.

    Each has its own requests; see `Router` for who gets which. One that dies too often, or has lost
    its node, stays down while the others serve; one whose node is there again is started again.

    May be made before there is an event loop; all else belongs to one.

    Args:
        launcher: starts the processes of all engines.
        unfinished: the live requests, in order of arrival, as another engine is to get them.
        config: the settings.
        max_restarts: how often an engine may be replaced within ten minutes.
        progress_timeout: see `Supervisor`.
        on_recovery: see there.
        model: see `Join`; only where engines are on other machines.

    Raises:
        ConfigError: the port for nodes, or the cluster's key, cannot be used.
    """

    def __init__(
        self,
        launcher: CoreLauncher,
        unfinished: Callable[[], list[EngineCoreRequest]],
        *,
        config: EngineConfig,
        model: str = "",
        max_restarts: int,
        progress_timeout: float,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
    ) -> None:
        self._unfinished = unfinished
        self._size = config.parallel.data_parallel_size
        self._first = config.parallel.first_engine
        self._router = Router(
            config.cache.block_size,
            self._size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self._gone: dict[int, EngineDeadError] = {}
        """Engines that are not started again."""
        self._reads: dict[int, asyncio.Task[EngineCoreOutputs]] = {}
        """Of each engine's next outputs; begun when those before have been taken in."""
        self._last_read = -1
        parallel = config.parallel
        self._local = parallel.num_local_engines
        self._hub: Hub | None = None
        self._news = asyncio.Event()
        """Set when there are engines, or nodes for them, that are not looked at yet."""
        self._news_read: asyncio.Task[bool] | None = None
        self._scaling = asyncio.Lock()
        self._leaving: set[int] = set()
        """Engines that get nothing more, since they will be ended."""
        self._waiting_since = time.monotonic()
        self._told_missing = False
        if self._local < self._size:
            assert parallel.data_parallel_address is not None
            assert parallel.cluster_key_file is not None
            self._hub = Hub(
                parallel.data_parallel_address,
                parallel.data_parallel_rpc_port,
                ClusterKey.from_file(parallel.cluster_key_file),
                model=model,
                size=self._size,
                local=self._local,
                on_join=self._note_join,
            )

        def note_recovery(recovery: Recovery) -> None:
            on_recovery(recovery)
            self._news.set()

        def make(index: int, first: CoreReady | None) -> Supervisor:
            return Supervisor(
                RemoteLauncher(self._hub, launcher, index)
                if self._hub is not None and index >= self._local
                else launcher,
                partial(self._requests_of, index),
                max_restarts=max_restarts,
                progress_timeout=progress_timeout,
                on_recovery=note_recovery,
                on_death=partial(self._hand_over, index),
                engine_index=index,
                first=first,
                number=self._first + index,
            )

        self._make = make
        self._supervisors: dict[int, Supervisor] = {}
        try:
            self._supervisors[0] = make(0, None)
        except BaseException:
            if self._hub is not None:
                self._hub.close()
            raise

    @cached_property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Result once all engines have loaded the model; `EngineDeadError` if one cannot."""
        return asyncio.get_running_loop().create_future()

    @property
    def up(self) -> bool:
        """Whether there is an engine whose model is loaded; in the beginning, whether all are."""
        return self.ready.done() and any(s.up for s in self._supervisors.values())

    @property
    def down(self) -> dict[int, str]:
        """The engines that serve nothing now, by number, and what is done about it."""
        return {
            self._first + index: self._describe(index)
            for index, supervisor in self._supervisors.items()
            if not supervisor.up
        }

    @property
    def pids(self) -> list[int]:
        """The engine processes' numbers."""
        return [self.pid_of(index) for index in self._supervisors]

    def family_of(self, index: int) -> list[int]:
        """The numbers of an engine's processes, see `Supervisor.family`."""
        return self._supervisors[index].family if index in self._supervisors else []

    @property
    def missing(self) -> list[int]:
        """The engines for which no node has joined yet, once the first engine is ready."""
        first = self._supervisors[0]
        if self.ready.done() or not first.ready.done():
            return []
        there = self._supervisors.keys() - self._gone.keys()
        return [index for index in range(self._size) if index not in there]

    def pid_of(self, index: int) -> int:
        """An engine process' number; -1: there is none yet."""
        return self._supervisors[index].pid if index in self._supervisors else -1

    def engine_of(self, request_id: str) -> int | None:
        """Where a live core request is."""
        return self._router.engine_of(request_id)

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`: of any engine; raises what ended the last one."""
        while True:
            await self._look_around()
            for index, supervisor in self._alive():
                if index not in self._reads:
                    self._reads[index] = asyncio.create_task(supervisor.get_output())
            if not any(read.done() for read in self._reads.values()):
                awaited: set[asyncio.Future[Any]] = set(self._reads.values())
                awaited |= {s.ready for _, s in self._alive() if not s.ready.done()}
                if self._news_read is None or self._news_read.done():
                    self._news_read = asyncio.create_task(self._news.wait())
                awaited.add(self._news_read)
                timeout = None if self._hub is None else _JOIN_POLL
                await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            done = [index for index, read in self._reads.items() if read.done()]
            if not done:
                continue
            index = self._last_read = min(done, key=lambda i: (i <= self._last_read, i))
            try:
                outputs = self._reads.pop(index).result()
            except EngineDeadError as error:
                await self._give_up(index, error)
                stats = SchedulerStats()  # it does nothing any more
                return EngineCoreOutputs([], stats, clock.now(), index)
            return self._take(index, outputs)

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """See `WatchedClient`: of the engine whose outputs came last."""
        index = self._last_read
        if index in self._gone or index in self._reads or index not in self._supervisors:
            return None
        outputs = self._supervisors[index].get_output_nowait()
        return None if outputs is None else self._take(index, outputs)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`."""
        index = self._router.place(request, self._candidates())
        await self._supervisors[index].add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        of_engines: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self._router.engine_of(request_id)
            if index is not None:
                of_engines.setdefault(index, []).append(request_id)
        self._router.remove(request_ids)
        for index, ids in of_engines.items():
            await self._supervisors[index].abort_requests(ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`: calls it in all engines, and waits for those being started.

        Returns:
            Of truths whether all are true, of stats the sum, of texts all, separated by commas.

        Raises:
            OctavoError: what the first engine raised that raised something.
            StepFailedError: an engine died before it answered.
        """
        await asyncio.shield(self.ready)
        asked = list(self._alive())
        results = await asyncio.gather(
            *(supervisor.call_utility(method, *args) for _, supervisor in asked),
            return_exceptions=True,
        )
        results = [r for (i, _), r in zip(asked, results, strict=True) if i not in self._gone]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if method == "reset_prefix_cache":
            for index in range(self._size):
                self._router.forget_prefixes(index)
        return _join(results)

    @property
    def scaling(self) -> bool:
        """Whether engines are being added or ended."""
        return self._scaling.locked()

    async def scale(self, size: int) -> None:
        """Changes the number of engines, while requests go on.

        New ones get requests once they have loaded the model; what is in flight at one that is
        ended goes on at others.

        Raises:
            ScalingError: there is no room, an engine cannot be started (then all is as before), or
                the number is being changed already.
        """
        if self._scaling.locked():
            raise ScalingError("The number of engines is being changed already; ask again later.")
        async with self._scaling:
            first = await asyncio.shield(self.ready)
            new = range(self._size, size)
            for index in new:
                self._check_room(len(new), first)
                self._supervisors[index] = self._make(index, first)
            self._size = max(size, self._size)
            self._news.set()
            failed = await asyncio.gather(
                *(asyncio.shield(self._supervisors[i].ready) for i in new), return_exceptions=True
            )
            errors = [error for error in failed if isinstance(error, BaseException)]
            keep = new.start if errors else size
            await self._end(range(keep, self._size))
            self._size = keep
            if errors:
                raise ScalingError(f"An engine could not be started: {errors[0]}.")

    def _check_room(self, num_new: int, first: CoreReady) -> None:
        needed, free = num_new * first.plan.total, cpu_memory()[1]
        if needed > free:
            raise ScalingError(
                f"{num_new} more engines need {needed / 2**20:,.0f} MiB, and "
                f"{free / 2**20:,.0f} MiB are free; start the server with a smaller KV cache "
                "(--kv-cache-memory-bytes)."
            )

    async def _end(self, indices: range) -> None:
        """Ends engines; their requests go on at the others."""
        self._leaving |= set(indices)
        for index in reversed(indices):
            if index not in self._gone:
                await self._move(index, {r.request_id for r in self._requests_of(index)})
            supervisor = self._supervisors.pop(index)  # nobody reads it again
            read = self._reads.pop(index, None)
            if read is not None:
                read.cancel()
                await asyncio.wait({read})
            self._router.forget_prefixes(index)
            self._gone.pop(index, None)
            await supervisor.shutdown()
            self._leaving.discard(index)

    def fail_calls(self, error: Exception) -> None:
        """Fails everything that waits for an answer of an engine, for good."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whether anybody waits for it or not
        for supervisor in self._supervisors.values():
            supervisor.fail_calls(error)

    async def shutdown(self) -> None:
        """See `EngineClient`."""
        for read in (*self._reads.values(), *filter(None, [self._news_read])):
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await asyncio.gather(*(s.shutdown() for s in self._supervisors.values()))
        if self._hub is not None:
            await self._hub.shutdown()

    def close(self) -> None:
        """`shutdown` for callers without an event loop."""
        for supervisor in self._supervisors.values():
            supervisor.close()
        if self._hub is not None:
            self._hub.close()

    def _alive(self) -> Iterator[tuple[int, Supervisor]]:
        """The engines that run or are being started."""
        return (item for item in self._supervisors.items() if item[0] not in self._gone)

    def _candidates(self, but: int | None = None) -> list[int]:
        """Those that may get a request: who serves, or else who will."""
        alive = [(i, s) for i, s in self._alive() if i != but and i not in self._leaving]
        return [index for index, s in alive if s.serving] or [index for index, _ in alive]

    async def _look_around(self) -> None:
        """Starts the others when the first one is ready, and tells when all are.

        Requests that wait for an engine go on at others as soon as there are some.

        Raises:
            EngineDeadError: no node has come for some.
        """
        self._news.clear()
        if self._hub is not None:
            self._hub.attach()
            self._revive()
        await self._rescue()
        if self.ready.done() or not self._supervisors[0].ready.done():
            return
        first = self._supervisors[0].ready.result()
        missing = self.missing
        for index in missing:
            if self._hub is None or index < self._local or self._hub.has(index):
                self._supervisors[index] = self._make(index, first)
        if not self._told_missing and (awaited := self.missing):
            self._told_missing = True
            logger.info("waiting for a node for engine %s", ", ".join(map(str, awaited)))
        if not missing:
            if all(s.ready.done() for s in self._supervisors.values()):
                self.ready.set_result(first)
        elif time.monotonic() - self._waiting_since > JOIN_SECONDS:
            alone = ", ".join(str(index) for index in missing)
            raise EngineDeadError(
                f"no node has joined for engine {alone} within {JOIN_SECONDS:.0f} s: start `octavo "
                f"serve --headless --data-parallel-start-rank {missing[0]}` on the other machine"
            )

    def _note_join(self, ranks: range) -> None:
        self._news.set()

    def _revive(self) -> None:
        """Engines that were given up are started again where a node has come for them."""
        assert self._hub is not None
        for index in [i for i in self._gone if i >= self._local and self._hub.has(i)]:
            logger.info("engine %d is started again, since its node is there", index)
            del self._gone[index]
            self._reads.pop(index, None)
            # Nothing runs there any more; what the hub knows of its process is let go.
            self._supervisors[index].close()
            self._supervisors[index] = self._make(index, self._supervisors[0].ready.result())

    def _describe(self, index: int) -> str:
        """What is done about an engine that serves nothing now."""
        gone = self._gone.get(index)
        if gone is None:
            return "is being started"
        missing = isinstance(gone, NodeMissingError)
        return "waits for its node" if missing else "has died too often"

    def _requests_of(self, index: int) -> list[EngineCoreRequest]:
        """The live requests of an engine."""
        placed = self._router.engine_of
        return [r for r in self._unfinished() if placed(r.child_ids[0]) == index]

    def _take(self, index: int, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """What an engine brought for the requests that are its own."""
        router, ended = self._router, []
        outputs.engine_index = index
        outputs.outputs = [o for o in outputs.outputs if router.engine_of(o.request_id) == index]
        for output in outputs.outputs:
            if output.finish_reason is not None:
                ended.append(output.request_id)
            elif output.new_token_ids:
                router.note_token(output.request_id)
        router.remove(ended)
        return outputs

    async def _hand_over(self, index: int, failed: set[str]) -> int:
        """Has other engines go on with what one that died had; returns how many answers these are.

        A suspect stays where it is: it would end another engine.

        Args:
            index: the engine.
            failed: ids of answers that are given up.
        """
        self._router.forget_prefixes(index)
        if not self._can_serve(but=index):
            return 0
        dead = self._supervisors[index]
        ids = {r.request_id for r in self._requests_of(index) if failed.isdisjoint(r.child_ids)}
        return await self._move(index, {i for i in ids if dead.deaths_of(i) < SUSPECT})

    async def _rescue(self) -> None:
        """Has others go on with what came to an engine while it was being started.

        A suspect stays, see `_hand_over`.
        """
        for index, supervisor in list(self._alive()):
            if not supervisor.up and self._router.load(index) and self._can_serve(but=index):
                deaths_of = supervisor.deaths_of
                waiting = [r for r in self._requests_of(index) if deaths_of(r.request_id) < SUSPECT]
                await self._move(index, {r.request_id for r in waiting})
                answers = [i for r in waiting for i in r.child_ids]
                placed = self._router.engine_of
                await supervisor.abort_requests([i for i in answers if placed(i) != index])

    def _can_serve(self, but: int) -> bool:
        """Whether another engine serves."""
        return any(self._supervisors[i].serving for i in self._candidates(but))

    async def _move(self, index: int, request_ids: set[str]) -> int:
        """Gives requests of an engine to others; returns how many answers these are to make."""
        dead, count = self._supervisors[index], 0
        for request in self._requests_of(index):
            request_id, placed = request.request_id, self._router.engine_of
            # It may have ended while another one was sent.
            if request_id in request_ids and any(placed(i) == index for i in request.child_ids):
                target = self._router.place(request, self._candidates(but=index))
                await self._supervisors[target].adopt(request, dead.deaths_of(request_id))
                count += len(request.child_ids)
        if count:
            number = self._first + index
            logger.warning("requests of engine %d go on at others (requests: %d)", number, count)
        return count

    async def _give_up(self, index: int, error: EngineDeadError) -> None:
        """An engine is not started again; raises `error` if it was the last, or never ready.

        One without a node, unless it was the last, is again when there is a node.
        """
        others = self._supervisors.keys() - self._gone.keys() - self._leaving - {index}
        missing = isinstance(error, NodeMissingError)
        if not others or not (missing or self.ready.done()):
            raise error
        logger.error("engine %d stays down, the others serve: %s", self._first + index, error)
        self._gone[index] = error
        self._supervisors[index].fail_calls(error)
        self._router.forget_prefixes(index)
        await self._move(index, {r.request_id for r in self._requests_of(index)})


def _join(results: list[Any]) -> Any:
    """What a call of all engines returns."""
    first = results[0]
    if isinstance(first, bool):
        return all(results)
    if isinstance(first, str):
        return ", ".join(results)
    if isinstance(first, list):  # stats are the only ones
        stats = [msgspec.convert(result, SchedulerStats) for result in results]
        return list(msgspec.structs.astuple(SchedulerStats.join(stats)))
    return first
