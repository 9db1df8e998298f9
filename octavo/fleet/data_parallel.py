"""Client of several engines, each with the whole model: each request is sent to one of them.

All engines use the first one's memory plan. An answer only depends on prompt, parameters and seed,
so when an engine dies, other engines continue its requests at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.core_messages import CoreReady
from octavo.errors import EngineDeadError, NodeMissingError, ScalingBusyError, ScalingError
from octavo.fleet.cluster import ClusterKey, Hub, RemoteLauncher
from octavo.fleet.core_client import ElasticClient
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.mp_client import EngineProcess
from octavo.fleet.routing import Router
from octavo.fleet.supervisor import SUSPECT, Recovery, Supervisor
from octavo.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.plan.setup import Machine
from octavo.system import clock
from octavo.system.device import cpu_memory, num_cpus

logger = logging.getLogger(__name__)

# Time for the nodes to join after the start.
JOIN_SECONDS = 600.0
# Interval of checks for that timeout.
_JOIN_POLL = 1.0


class DataParallelClient:
    """Client of several engines, each supervised and replaced by a `Supervisor`.

    Each engine has its own requests; `Router` assigns them. An engine that dies too often, or has
    lost its node, stays down while the others serve; when its node returns, it is started again.

    It may be created before there is an event loop; all other methods need one.

    Args:
        launcher: starts the processes of all engines.
        unfinished: returns the live requests, in order of arrival, as another engine should receive
            them.
        config: the settings of each engine; see `share_cores`.
        max_restarts: maximum number of replacements of an engine within ten minutes.
        progress_timeout: see `Supervisor`.
        on_recovery: see `Supervisor`.
        model: see `Join`; only needed for engines on other machines.

    Raises:
        ConfigError: the port for nodes, or the cluster's key, is unusable.
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
            num_adapters=config.lora.num_in_memory if config.lora.enable_lora else 0,
        )
        self._gone: dict[int, EngineDeadError] = {}
        """Engines that are not started again, with the cause."""
        self._reads: dict[int, asyncio.Task[EngineCoreOutputs]] = {}
        """Tasks that read each engine's next outputs; started after the previous ones are
        processed."""
        self._last_read = -1
        parallel = config.parallel
        self._divides_experts = config.divides_experts
        self._is_elastic = parallel.enable_elastic_ep
        self._num_threads = config.device.num_threads or num_cpus()
        self._local = parallel.num_local_engines
        self._hub: Hub | None = None
        self._news = asyncio.Event()
        """Event that is set when new engines, or nodes for them, need attention."""
        self._news_read: asyncio.Task[bool] | None = None
        self._scaling = asyncio.Lock()
        self._leaving: set[int] = set()
        """Engines that receive no more requests, since they will be ended."""
        self._waiting_since = time.monotonic()
        self._told_missing = False
        if self._local < self._size:
            assert parallel.data_parallel_address is not None
            assert parallel.cluster_key_file is not None
            key = ClusterKey.from_file(parallel.cluster_key_file)
            self._hub = Hub(
                parallel.data_parallel_address,
                parallel.data_parallel_rpc_port,
                key,
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
                is_held_up=partial(self._is_held_up, index),
                blocker=partial(self._blocker, index),
            )

        self._make, self._launcher = make, launcher
        self._supervisors: dict[int, Supervisor] = {}
        try:
            if self._hub is not None and self._divides_experts:
                address, pair = self._hub.reserve_next_port(), (key.public, key.secret)
                launcher.span(Machine(0, self._local, address, *pair, os.urandom(16)))
            self._supervisors[0] = make(0, None)
        except BaseException:
            if self._hub is not None:
                self._hub.close()
            raise

    @cached_property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Future that resolves once all engines are loaded; `EngineDeadError` if one fails."""
        return asyncio.get_running_loop().create_future()

    @property
    def up(self) -> bool:
        """True if an engine has its model loaded; at the start, only if all have."""
        return self.ready.done() and any(s.up for s in self._supervisors.values())

    @property
    def down(self) -> dict[int, str]:
        """Engines that are not serving, by index, with their state."""
        return {
            self._first + index: self._describe(index)
            for index, supervisor in self._supervisors.items()
            if not supervisor.up
        }

    @property
    def pids(self) -> list[int]:
        """Ids of the engine processes."""
        return [self.pid_of(index) for index in self._supervisors]

    @property
    def elastic(self) -> ElasticClient | None:
        """This client if the number of engines may change, else None."""
        return self if self._is_elastic else None

    async def pages(self) -> list[bytes]:
        """Return []: there is no other front end."""
        return []

    def family_of(self, index: int) -> list[int]:
        """Return the ids of an engine's processes, see `Supervisor.family`."""
        return self._supervisors[index].family if index in self._supervisors else []

    @property
    def missing(self) -> list[int]:
        """Indices of the engines without a node so far, once the first engine is ready."""
        first = self._supervisors[0]
        if self.ready.done() or not first.ready.done():
            return []
        there = self._supervisors.keys() - self._gone.keys()
        return [index for index in range(self._size) if index not in there]

    def pid_of(self, index: int) -> int:
        """Return the id of an engine's process; -1 if it has none yet."""
        return self._supervisors[index].pid if index in self._supervisors else -1

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine of a live core request."""
        return self._router.engine_of(request_id)

    def holder_of(self, request_id: str) -> tuple[int, int] | None:
        """Implement `WatchedClient`."""
        return self._router.holder_of(request_id)

    async def get_output(self) -> EngineCoreOutputs:
        """Return the outputs of any engine; raise the error that ended the last one."""
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
                stats = SchedulerStats()  # its engine is down
                return EngineCoreOutputs([], stats, clock.now(), index)
            return self._take(index, outputs)

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """Return more outputs of the engine that `get_output` read last."""
        index = self._last_read
        if index in self._gone or index in self._reads or index not in self._supervisors:
            return None
        outputs = self._supervisors[index].get_output_nowait()
        return None if outputs is None else self._take(index, outputs)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Implement `EngineClient`."""
        await self.adopt(request, 0)

    async def adopt(self, request: EngineCoreRequest, deaths: int) -> None:
        """Accept a request of other engines, with its `deaths_of` there."""
        index = self._router.place(request, self._candidates())
        await self._supervisors[index].adopt(request, deaths)

    def deaths_of(self, request_id: str) -> int:
        """Return the number of consecutive deaths of an engine with a request in flight."""
        return max(supervisor.deaths_of(request_id) for supervisor in self._supervisors.values())

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        of_engines: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self._router.engine_of(request_id)
            if index is not None:
                of_engines.setdefault(index, []).append(request_id)
        self._router.remove(request_ids)
        for index, ids in of_engines.items():
            await self._supervisors[index].abort_requests(ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of all engines, including those being started.

        Returns:
            For bools: True if all are; for stats, their sum; for texts, all, separated by commas;
            for dicts by engine, one with all engines.

        Raises:
            OctavoError: the first error of an engine.
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
        """True while engines are being added or ended."""
        return self._scaling.locked()

    async def scale(self, size: int) -> None:
        """Change the number of engines while requests continue.

        New engines receive requests once they have loaded the model. Other engines continue the
        requests of those that are ended.

        Raises:
            ScalingError: memory is insufficient, an engine cannot be started (then nothing has
                changed).
            ScalingBusyError: another change is in progress.
        """
        if self._scaling.locked():
            raise ScalingBusyError
        async with self._scaling:
            first = await asyncio.shield(self.ready)
            new = range(self._size, size)
            if new and size * self._num_threads > (cores := num_cpus()):
                logger.warning(
                    "%d engines with %d threads each exceed the %d available cores; start the "
                    "server with fewer threads (--num-threads)",
                    size,
                    self._num_threads,
                    cores,
                )
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
        """End engines; the others continue their requests."""
        self._leaving |= set(indices)
        for index in reversed(indices):
            if index not in self._gone:
                await self._move(index, {r.request_id for r in self._requests_of(index)})
            supervisor = self._supervisors.pop(index)  # no task reads it again
            read = self._reads.pop(index, None)
            if read is not None:
                read.cancel()
                await asyncio.wait({read})
            self._router.forget_prefixes(index)
            self._gone.pop(index, None)
            await supervisor.shutdown()
            self._leaving.discard(index)

    def fail_calls(self, error: Exception) -> None:
        """Fail all pending and future calls."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved
        for supervisor in self._supervisors.values():
            supervisor.fail_calls(error)

    async def shutdown(self) -> None:
        """Implement `EngineClient`."""
        for read in (*self._reads.values(), *filter(None, [self._news_read])):
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await asyncio.gather(*(s.shutdown() for s in self._supervisors.values()))
        self._launcher.close()
        if self._hub is not None:
            await self._hub.shutdown()

    def close(self) -> None:
        """Shut down without an event loop."""
        for supervisor in self._supervisors.values():
            supervisor.close()
        if self._hub is not None:
            self._hub.close()

    def _is_held_up(self, index: int) -> bool:
        """Return True if an engine waits for the experts of another engine that is not up."""
        others = (s for i, s in self._supervisors.items() if i != index)
        return self._divides_experts and not all(supervisor.up for supervisor in others)

    def _blocker(self, index: int) -> EngineProcess | None:
        """Return the process of an engine that this one waits for, if they divide the experts."""
        behind = self._launcher.engines_behind()
        return None if index in behind or not behind else self._supervisors[behind[0]].process

    def _alive(self) -> Iterator[tuple[int, Supervisor]]:
        """Return the engines that run or are being started."""
        return (item for item in self._supervisors.items() if item[0] not in self._gone)

    def _candidates(self, but: int | None = None) -> list[int]:
        """Return the engines that may receive a request: serving ones, or else all."""
        alive = [(i, s) for i, s in self._alive() if i != but and i not in self._leaving]
        return [index for index, s in alive if s.serving] or [index for index, _ in alive]

    async def _look_around(self) -> None:
        """Start the other engines when the first one is ready, and resolve `ready` when all are.

        Requests that wait for an engine continue on others as soon as some serve.

        Raises:
            EngineDeadError: no node has joined for an engine in time.
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
        """Restart engines that stay down, if a node has joined for them."""
        assert self._hub is not None
        for index in [i for i in self._gone if i >= self._local and self._hub.has(i)]:
            logger.info("engine %d is started again, since its node is there", index)
            del self._gone[index]
            self._reads.pop(index, None)
            # No process runs there any more; this only drops the hub's record of it.
            self._supervisors[index].close()
            self._supervisors[index] = self._make(index, self._supervisors[0].ready.result())

    def _describe(self, index: int) -> str:
        """Describe the state of an engine that is not serving."""
        gone = self._gone.get(index)
        if gone is None:
            return "is being started"
        missing = isinstance(gone, NodeMissingError)
        return "waits for its node" if missing else "has died too often"

    def _requests_of(self, index: int) -> list[EngineCoreRequest]:
        """Return the live requests of an engine."""
        placed = self._router.engine_of
        return [r for r in self._unfinished() if placed(r.child_ids[0]) == index]

    def _take(self, index: int, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Filter an engine's outputs for the requests that it owns."""
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
        """Move the requests of a dead engine to others; return the number of their answers.

        Suspects (requests in flight at `SUSPECT` consecutive deaths) stay: they could end another
        engine.

        Args:
            index: the dead engine.
            failed: ids of failed answers.
        """
        self._router.forget_prefixes(index)
        if self._divides_experts and self._hub is not None:
            self._end_generation(index)
        if not self._can_serve(but=index):
            return 0
        dead = self._supervisors[index]
        ids = {r.request_id for r in self._requests_of(index) if failed.isdisjoint(r.child_ids)}
        return await self._move(index, {i for i in ids if dead.deaths_of(i) < SUSPECT})

    def _has_lost_node(self, index: int) -> bool:
        """Return True if an engine that divides the experts has lost its node while it loaded."""
        is_there = self._hub is None or index < self._local or self._hub.has(index)
        return self._divides_experts and not is_there

    def _end_generation(self, index: int) -> None:
        """Start all engines again, since one has died, and the experts are on several machines.

        Args:
            index: the dead engine.
        """
        if self._launcher.is_outdated(index):
            return  # it was ended with the others
        number = self._first + index
        for other, supervisor in self._supervisors.items():
            if other != index:
                supervisor.restart(f"the engine divides experts with engine {number}, which died,")
        self._launcher.begin_generation()

    async def _rescue(self) -> None:
        """Move the requests that wait for a starting engine to other engines.

        Requests that may have ended an engine stay, see `_hand_over`.
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
        """Return True if another engine serves.

        Engines that divide the experts cannot serve while one of them is missing.
        """
        return not self._divides_experts and any(
            self._supervisors[i].serving for i in self._candidates(but)
        )

    async def _move(self, index: int, request_ids: set[str]) -> int:
        """Move requests of an engine to others; return the number of their answers."""
        dead, count = self._supervisors[index], 0
        for request in self._requests_of(index):
            request_id, placed = request.request_id, self._router.engine_of
            # The request may have ended while another one was sent.
            if request_id in request_ids and any(placed(i) == index for i in request.child_ids):
                target = self._router.place(request, self._candidates(but=index))
                await self._supervisors[target].adopt(request, dead.deaths_of(request_id))
                count += len(request.child_ids)
        if count:
            number = self._first + index
            logger.warning(
                "other engines continue requests of engine %d (requests: %d)", number, count
            )
        return count

    async def _give_up(self, index: int, error: EngineDeadError) -> None:
        """Stop restarting an engine; raise `error` if it was the last, or was never ready.

        Engines that divide the experts cannot continue without it. If it has lost its node, they
        wait.

        If others are left, an engine without a node restarts when a node joins.
        """
        others = self._supervisors.keys() - self._gone.keys() - self._leaving - {index}
        if self._has_lost_node(index):
            error = NodeMissingError(str(error))
        missing = isinstance(error, NodeMissingError)
        can_do_without = self.ready.done() and not self._divides_experts
        if not others or not (missing or can_do_without):
            raise error
        if self._divides_experts:
            self._end_generation(index)
        they = "wait for it" if self._divides_experts else "serve"
        logger.error("engine %d stays down, the others %s: %s", self._first + index, they, error)
        self._gone[index] = error
        self._supervisors[index].fail_calls(error)
        self._router.forget_prefixes(index)
        await self._move(index, {r.request_id for r in self._requests_of(index)})


def _join(results: list[Any]) -> Any:
    """Combine the results of a call of all engines."""
    first = results[0]
    if isinstance(first, bool):
        return all(results)
    if isinstance(first, str):
        return ", ".join(results)
    if isinstance(first, dict):
        return {index: value for result in results for index, value in result.items()}
    if isinstance(first, list):  # only stats are lists
        stats = [msgspec.convert(result, SchedulerStats) for result in results]
        return list(msgspec.structs.astuple(SchedulerStats.join(stats)))
    return first
