"""An engine core in another process that is started again when it dies, so that no request is lost.

What a request has got is in the front end's records. Its answer depends on nothing but prompt,
parameters and seed, so another engine goes on from the prompt and the tokens so far, and what comes
is what would have come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from octavo.engine.wire import CoreReady
from octavo.errors import EngineDeadError, EngineStoppedError, StepFailedError, reason_of
from octavo.fleet.cluster import RemoteLauncher
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.mp_client import AsyncMPClient
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from octavo.system import clock

logger = logging.getLogger(__name__)

# How far back restarts are counted, in seconds.
_RESTART_WINDOW = 600.0
# Seconds before a start that follows on two deaths with no token between; each further one waits
# twice as long, up to the most.
_FIRST_DELAY = 0.5
_MOST_DELAY = 10.0
# Deaths in a row: after so many a request is only tried alone, and after so many alone it is given
# up; after one more if it got something between. Once can be chance.
SUSPECT = 2
_CULPRIT = 2
# Steps with output that clear a request. Some kill with a certain token: they get as far as that
# each time, and the one before it may be new.
_CLEARED = 3
# An engine that takes over has the progress timeout and so many times what the first one needed to
# load its model.
_LOADING = 4
_HEARTBEAT_INTERVAL = 1.0
# How often a spare that has died is replaced: what kills it may kill the next one.
_SPARE_INTERVAL = 60.0
# Calls that end when memory has been given back, or weights have been read.
_LONG_CALLS = ("sleep", "wake_up")


@dataclass(frozen=True)
class Recovery:
    """An engine died, and another one has taken its place."""

    reason: str
    """What died, and why."""
    num_requests: int
    """Requests that go on."""
    seconds: float
    """From the moment that the death was noticed until the new engine took requests."""
    engine_index: int = 0


async def _keep_all(failed: set[str]) -> int:
    """There is no other engine that could go on with a dead one's requests."""
    return 0


@dataclass(slots=True)
class _Suspect:
    """A request that was in flight when an engine died, until it is cleared."""

    answers: set[str] = field(default_factory=set)
    """Ids of those that are still to be made."""
    deaths: int = 0
    """In a row that it was in flight at."""
    deaths_alone: int = 0
    """Those at which it was on trial, or nobody else was. Whose number is highest is tried first,
    with nobody beside it."""
    num_outputs: int = 0
    """Steps in which the engine that has it brought something for it."""


class Supervisor:
    """See `EngineClient`: the core's process is watched, and replaced when it ends or hangs.

    The requests in flight are handed in again with what they have. Those that were in flight at two
    deaths in a row, with no more than a token or two between, may be the cause: they are tried one
    by one, and one with which alone the engine dies again and again fails.

    May be made before there is an event loop; all else belongs to one.

    Args:
        launcher: starts the processes.
        unfinished: the live requests, in order of arrival, as another engine is to get them.
        max_restarts: how often an engine may be replaced within ten minutes.
        progress_timeout: seconds without a sign of life, or with requests waiting and no step,
            after which the process is killed.
        on_recovery: is told of each engine that was replaced, when the new one is ready.
        on_death: is told when the engine has died, with the answers that are given up; may hand
            requests over to others (`adopt`), and returns how many answers these are to make.
        engine_index: the engine's number among several.
        first: what the first of several engines said, whose memory plan all of them have.
        number: the engine's among those of all servers, for log lines; None: there is only one.
    """

    def __init__(
        self,
        launcher: CoreLauncher | RemoteLauncher,
        unfinished: Callable[[], list[EngineCoreRequest]],
        *,
        max_restarts: int,
        progress_timeout: float,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
        on_death: Callable[[set[str]], Awaitable[int]] = _keep_all,
        engine_index: int = 0,
        first: CoreReady | None = None,
        number: int | None = None,
    ) -> None:
        self._launcher = launcher
        self._unfinished = unfinished
        self._max_restarts = max_restarts
        self._progress_timeout = progress_timeout
        self._on_recovery = on_recovery
        self._on_death = on_death
        self._index, self._number = engine_index, number
        self._logger = logging.LoggerAdapter(logger, {} if number is None else {"engine": number})
        self._restarts: deque[float] = deque()
        self._fruitless = 0
        """Engines in a row that died before they brought a token."""
        self._suspects: dict[str, _Suspect] = {}
        self._suspect_of: dict[str, str] = {}
        """By the ids of their answers."""
        self._trials: deque[str] | None = None
        """Suspects: the first one is on trial, the others wait for theirs. None: no trials."""
        self._tried: set[str] = set()
        """Those that the engine has got meanwhile."""
        self._up = asyncio.Event()
        """Whether there is an engine that takes requests; or none any more, see `_error`."""
        self._error: Exception | None = None
        self._replacing: asyncio.Task[list[EngineCoreOutput]] | None = None
        """Goes on whether anybody waits for it or not."""
        self._listening = False
        """Whether somebody reads what the engine says."""
        self._began: tuple[float, str, int] | None = None
        """While there is no engine: since when, why, and how many requests go on."""
        self._started = time.monotonic()
        self._load_seconds = 0.0
        """What the first engine needed."""
        self._watcher: asyncio.Task[None] | None = None
        self._worker_pids: list[int] = []
        self._num_changes = 0
        """Calls being answered for which the engine may be silent for long."""
        self._process = launcher.launch(first, engine_index)
        self._client = AsyncMPClient(self._process)

    @cached_property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Result once the model is loaded for the first time; `EngineDeadError` if it cannot be."""
        return asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """The engine process' number."""
        return self._client.process.pid

    @property
    def pids(self) -> list[int]:
        """The same for who may have several engines."""
        return [self.pid]

    @property
    def family(self) -> list[int]:
        """The numbers of the engine process and of its workers; without them on other machines."""
        return [self.pid, *(self._worker_pids if self.pid > 0 else [])]

    @property
    def up(self) -> bool:
        """Whether there is an engine whose model is loaded."""
        return self._error is None and self._up.is_set()

    @property
    def missing(self) -> list[int]:
        """See `WatchedClient`: the engine is on this machine, or its node is there."""
        return []

    @property
    def down(self) -> dict[int, str]:
        """See `WatchedClient`."""
        return {} if self.up else {self._number or 0: "is being started"}

    @property
    def serving(self) -> bool:
        """Whether a request that comes now is computed at once, rather than after trials."""
        return self.up and self._trials is None

    def family_of(self, index: int) -> list[int]:
        """See `WatchedClient`."""
        return self.family

    def engine_of(self, request_id: str) -> int | None:
        """See `WatchedClient`."""
        return 0

    def deaths_of(self, request_id: str) -> int:
        """Deaths in a row that a request was in flight at."""
        suspect = self._suspects.get(request_id)
        return 0 if suspect is None else suspect.deaths

    async def adopt(self, request: EngineCoreRequest, deaths: int) -> None:
        """Takes a request of another engine that has died, with its `deaths_of` there."""
        if deaths:
            self._suspects[request.request_id] = _Suspect(set(request.child_ids), deaths)
            self._suspect_of |= dict.fromkeys(request.child_ids, request.request_id)
        await self.add_request(request)

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`; raises only what cannot be mended by another engine."""
        while True:
            if self._watcher is None:
                self._begin_watch()
            if self._replacing is not None:
                failed = await asyncio.shield(self._replacing)
                self._replacing = None
                # The new one has nothing yet.
                return EngineCoreOutputs(failed, SchedulerStats(), clock.now())
            self._listening = True
            try:
                outputs = await self._client.get_output()
            except EngineDeadError as error:
                self._replacing = asyncio.create_task(self._replace(error))
                continue
            finally:
                self._listening = False
            if self._fruitless or self._suspects:
                await self._note_progress(outputs.outputs)
            return outputs

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """See `WatchedClient`; none while there is more to do than to hand them on."""
        if self._watcher is None or self._replacing is not None or self._client.closed:
            return None
        return None if self._fruitless or self._suspects else self._client.get_output_nowait()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`: while there are trials, or no engine, it waits in the records."""
        if self._trials is None and not self._client.closed:
            await self._client.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        for request_id in request_ids:
            self._note_end(request_id)
        if not self._client.closed:  # otherwise who takes over looks at the records
            await self._client.abort_requests(request_ids)
            await self._go_on_with_trials()

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`: waits for an engine.

        Raises:
            StepFailedError: the engine died before it answered.
        """
        await self._up.wait()
        if self._error is not None:
            raise self._error
        self._num_changes += method in _LONG_CALLS
        try:
            return await self._client.call_utility(method, *args)
        finally:
            self._num_changes -= method in _LONG_CALLS

    def fail_calls(self, error: Exception) -> None:
        """Fails everything that waits for an answer of the core, for good."""
        self._error = error
        self._up.set()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whether anybody waits for it or not
        self._client.fail_calls(error)

    async def shutdown(self) -> None:
        """See `EngineClient`."""
        for task in (self._watcher, self._replacing):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})  # it starts no process any more
        self._launcher.shutdown()
        await self._client.shutdown()

    def close(self) -> None:
        """`shutdown` for callers without an event loop."""
        self._launcher.shutdown()
        self._client.close()
        self._client.process.shutdown()

    def _begin_watch(self) -> None:
        """Watches the engine that there is now."""
        self._client.ready.add_done_callback(self._became_ready)
        self._watcher = asyncio.create_task(self._watch(self._client))
        self._watcher.add_done_callback(_retrieve)

    def _became_ready(self, ready: asyncio.Future[CoreReady]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        if not self.ready.done():
            self._load_seconds = time.monotonic() - self._started
            self.ready.set_result(ready.result())
        self._up.set()
        self._worker_pids = ready.result().worker_pids
        if ready.result().plan.warm_spare:
            self._launcher.make_spare()
        if self._began is not None:
            (noticed, reason, count), self._began = self._began, None
            seconds = time.monotonic() - noticed
            self._logger.warning(
                "%s; another one was ready after %.1f s (requests that go on: %d)",
                reason,
                seconds,
                count,
            )
            self._on_recovery(Recovery(reason, count, seconds, self._index))

    async def _replace(self, error: EngineDeadError) -> list[EngineCoreOutput]:
        """Has another engine take over; returns the ends of requests that are given up.

        Raises:
            EngineDeadError: the engine could never be started, or died too often.
            NodeMissingError: its machine is gone.
        """
        noticed = time.monotonic()
        was_up = self.up
        self._up.clear()
        self._worker_pids = []
        assert self._watcher is not None
        self._watcher.cancel()
        if not self.ready.done():
            raise error
        self._note_restart(noticed, error)
        self._began = self._began or (noticed, str(error), 0)
        # Now: what comes from here on was not in flight.
        theirs = was_up and not isinstance(error, EngineStoppedError)
        failed = self._find_culprit(str(error)) if theirs else []
        self._client.fail_calls(
            StepFailedError("The engine was started again before it answered; ask again.")
        )
        given_up = {output.request_id for output in failed}
        moved = await self._on_death(given_up)
        await self._client.shutdown(timeout=0.0)
        while True:
            if self._fruitless:
                self._logger.warning("%s again before it brought anything", error)
                delay = _FIRST_DELAY * 2 ** (self._fruitless - 1)
                await asyncio.sleep(min(delay, _MOST_DELAY))
            self._fruitless += 1
            try:
                self._client = self._launch()
                break
            except OSError as failure:
                error = EngineDeadError(f"no process can be started: {reason_of(failure)}")
                self._note_restart(time.monotonic(), error)
        self._begin_watch()
        await self._hand_in(given_up, moved)
        return failed

    def _launch(self) -> AsyncMPClient:
        self._process = process = self._launcher.launch(self.ready.result(), self._index)
        try:
            return AsyncMPClient(process)
        except OSError:
            process.shutdown(0.0)
            raise

    def _note_restart(self, now: float, error: EngineDeadError) -> None:
        """Counts a restart.

        Raises:
            EngineDeadError: there were too many.
        """
        while self._restarts and self._restarts[0] < now - _RESTART_WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            raise self._final(error)
        self._restarts.append(now)

    def _final(self, error: EngineDeadError) -> EngineDeadError:
        if not self._max_restarts:
            return error
        return EngineDeadError(
            f"{error}; that was death {len(self._restarts) + 1} within ten minutes, and an engine "
            f"is replaced {self._max_restarts} times (--max-engine-restarts)"
        )

    def _find_culprit(self, reason: str) -> list[EngineCoreOutput]:
        """Notes who was in flight; returns the end of the request that the engine died of."""
        in_flight = self._unfinished()
        if self._trials is not None:
            in_flight = [r for r in in_flight if r.request_id in self._tried]
        for request in in_flight:
            self._suspects.setdefault(request.request_id, _Suspect()).deaths += 1
        if self._trials is not None:  # beside it are those that were cleared, if anybody
            in_flight = [r for r in in_flight if r.request_id == self._trials[0]]
        if len(in_flight) != 1:
            return []
        suspect = self._suspects[in_flight[0].request_id]
        suspect.deaths_alone += 1
        if suspect.deaths_alone < _CULPRIT + (suspect.num_outputs > 0):
            return []
        culprit = in_flight[0].child_ids[0]  # its siblings end with it
        self._logger.error("request %s is given up: %s while it was in flight", culprit, reason)
        return [
            EngineCoreOutput(
                culprit,
                [],
                finish_reason=FinishReason.ERROR,
                error="The engine died again and again with this request in flight, so it is "
                f"given up: {reason}.",
                error_kind="GivenUpError",
            )
        ]

    async def _hand_in(self, failed: set[str], moved: int) -> None:
        """Gives the new engine the live requests, or the first of the suspects.

        Args:
            failed: ids of answers that are given up.
            moved: answers that are made elsewhere now.
        """
        live = [r for r in self._unfinished() if failed.isdisjoint(r.child_ids)]
        assert self._began is not None
        self._began = *self._began[:2], moved + sum(len(r.child_ids) for r in live)
        before, self._suspects, self._suspect_of = self._suspects, {}, {}
        for request in live:
            suspect = before.get(request.request_id)
            if suspect is not None:
                suspect.answers, suspect.num_outputs = set(request.child_ids), 0
                self._suspects[request.request_id] = suspect
                self._suspect_of |= dict.fromkeys(suspect.answers, request.request_id)
        on_trial = [i for i, s in self._suspects.items() if s.deaths >= SUSPECT]
        on_trial.sort(key=lambda i: -self._suspects[i].deaths_alone)
        self._trials = deque(on_trial) if on_trial else None
        self._tried = set(on_trial[:1])
        await self._add(r for r in live if not on_trial or r.request_id == on_trial[0])

    async def _note_progress(self, outputs: list[EngineCoreOutput]) -> None:
        """The engine brought something: whoever got enough of it is no suspect any more."""
        got = {self._suspect_of.get(output.request_id, "") for output in outputs}
        for request_id in self._suspects.keys() & got:
            suspect = self._suspects[request_id]
            suspect.num_outputs += 1
            if suspect.num_outputs >= _CLEARED:
                del self._suspects[request_id]
        for output in outputs:
            if output.finish_reason is not None:
                self._note_end(output.request_id)
        if outputs:
            self._fruitless = 0
        await self._go_on_with_trials()

    def _note_end(self, answer: str) -> None:
        """An answer has ended; a request of which it was the last is no suspect any more."""
        request_id = self._suspect_of.pop(answer, "")
        suspect = self._suspects.get(request_id)
        if suspect is not None:
            suspect.answers.discard(answer)
            if not suspect.answers:
                del self._suspects[request_id]

    async def _go_on_with_trials(self) -> None:
        """Once the engine has survived a suspect, it gets the next one, or all the rest."""
        if not self._trials or self._trials[0] in self._suspects:
            return
        while self._trials and self._trials[0] not in self._suspects:
            self._trials.popleft()
        live = {request.request_id: request for request in self._unfinished()}
        if self._trials:
            self._tried.add(self._trials[0])
            await self._add([live[self._trials[0]]])
        else:
            self._trials = None
            await self._add(r for i, r in live.items() if i not in self._tried)

    async def _add(self, requests: Iterable[EngineCoreRequest]) -> None:
        for request in requests:
            await self._client.add_request(request)

    async def _watch(self, client: AsyncMPClient) -> None:
        """Kills a process that has stopped or spins: asks it again and again how far it is.

        Time is counted in naps, so that a machine that slept is no reason.
        """
        interval = min(_HEARTBEAT_INTERVAL, self._progress_timeout / 4)
        num_scheduled, stalled, since_spare = -1, 0.0, 0.0
        await self._wait_for_model(client, interval)
        while True:
            since_spare += interval
            if since_spare >= _SPARE_INTERVAL and client.ready.result().plan.warm_spare:
                self._launcher.make_spare()
                since_spare = 0.0
            stats = await self._ask(client, interval)
            waits = stats.num_running_reqs + stats.num_waiting_reqs > stats.num_held_reqs
            stuck = waits and stats.num_scheduled_tokens == num_scheduled
            stalled = stalled + interval if stuck else 0.0
            if stalled >= self._progress_timeout:
                client.process.kill(f"no step for {stalled:.1f} s although requests are waiting")
            num_scheduled = stats.num_scheduled_tokens
            await asyncio.sleep(interval)

    async def _wait_for_model(self, client: AsyncMPClient, interval: float) -> None:
        """Waits for the model; what stands still is killed, and who takes over but is too slow."""
        limit = self._progress_timeout + _LOADING * self._load_seconds
        waited = 0.0
        while not (await asyncio.wait({client.ready}, timeout=interval))[0]:
            waited += interval if self._listening else 0.0
            self._process.kill_if_stopped(interval, self._progress_timeout / 2)
            if self.ready.done() and waited >= limit:
                client.process.kill(f"the model was not loaded after {waited:.1f} s")
        client.ready.result()

    async def _ask(self, client: AsyncMPClient, interval: float) -> SchedulerStats:
        """How far the engine is; without an answer in time the process is killed."""
        answer, silent = asyncio.ensure_future(client.call_utility("stats")), 0.0
        try:
            while not (await asyncio.wait({answer}, timeout=interval))[0]:
                if self._listening and not self._num_changes:
                    silent += interval
                self._process.kill_if_stopped(interval, self._progress_timeout / 2)
                if silent >= self._progress_timeout:
                    client.process.kill(f"the engine has not answered for {silent:.1f} s")
            return msgspec.convert(answer.result(), SchedulerStats)
        finally:
            answer.cancel()


def _retrieve(watcher: asyncio.Task[None]) -> None:
    """A watcher ends with its engine, whose death is told otherwise."""
    error = None if watcher.cancelled() else watcher.exception()
    if error is not None and not isinstance(error, EngineDeadError | StepFailedError):
        logger.error("the engine is not watched any more", exc_info=error)
