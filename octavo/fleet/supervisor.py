"""Engine core in another process that is replaced when it dies, so that no request is lost.

The front end's records contain the tokens of each request so far. An answer only depends on prompt,
parameters and seed, so another engine continues from the prompt and these tokens with the same
result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine.core_messages import CoreReady
from octavo.errors import EngineDeadError, EngineStoppedError, StepFailedError, reason_of
from octavo.fleet.mp_client import AsyncMPClient, EngineProcess
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.system import clock

if TYPE_CHECKING:
    from octavo.fleet.cluster import RemoteLauncher
    from octavo.fleet.core_launcher import CoreLauncher

logger = logging.getLogger(__name__)

# Window in which restarts are counted, in seconds.
_RESTART_WINDOW = 600.0
# Seconds before a start after two deaths without a token between them; the delay doubles with each
# further death, up to the maximum.
_FIRST_DELAY = 0.5
_MOST_DELAY = 10.0
# Consecutive deaths: after the first number a request is only tried alone, and after the second
# number alone it fails; one more is allowed if it made progress. A single death can be
# chance.
SUSPECT = 2
_CULPRIT = 2
# Steps with output that clear a request. Some requests kill the engine at a certain token: they
# reach it each time, and the token before it may be new.
_CLEARED = 3
# Timeout of a replacement's start: the progress timeout, plus the time of the interpreter and
# its imports on a busy machine, plus this multiple of the first engine's loading time. That engine
# has started earlier, as a spare one.
_START_SECONDS = 30.0
_LOADING = 4
_HEARTBEAT_INTERVAL = 1.0
# Interval of replacing dead spares: the cause may kill the next one, too.
_SPARE_INTERVAL = 60.0
# Calls that last until memory is released, or weights are read.
_LONG_CALLS = ("sleep", "wake_up")


@dataclass(frozen=True)
class Recovery:
    """Replacement of a dead engine."""

    reason: str
    """Cause of the death."""
    num_requests: int
    """Number of requests that continue."""
    seconds: float
    """Time from the detection of the death until the new engine accepted requests."""
    engine_index: int = 0


async def _keep_all(failed: set[str]) -> int:
    """Keep all requests: no other engine could continue them."""
    return 0


@dataclass(slots=True)
class _Suspect:
    """Request that was in flight at an engine's death, until it is cleared."""

    answers: set[str] = field(default_factory=set)
    """Ids of the unfinished answers."""
    deaths: int = 0
    """Number of consecutive deaths with the request in flight."""
    deaths_alone: int = 0
    """Number of deaths during its trial, or with no other request in flight. The request with the
    highest number is tried first, alone."""
    num_outputs: int = 0
    """Number of steps in which the current engine produced output for it."""


class Supervisor:
    """Client that supervises the core's process, and replaces it when it ends or hangs.

    Requests in flight are submitted again with their tokens so far. Those in flight at two deaths
    in a row, with no more than a token or two between them, may be the cause. They are tried one by
    one; a request fails if the engine dies repeatedly with it alone.

    It may be created before there is an event loop; all other methods need one.

    Args:
        launcher: starts the processes.
        unfinished: returns the live requests, in order of arrival, as another engine should receive
            them.
        max_restarts: maximum number of replacements within ten minutes.
        progress_timeout: seconds without a heartbeat, or with waiting requests and no step, after
            which the process is killed.
        on_recovery: called for each replaced engine, when the new one is ready.
        on_death: called when the engine has died, with the failed answers; may move
            requests to other engines (`adopt`), and returns the number of their answers.
        engine_index: index of the engine among several.
        first: answer of the first of several engines; all use its memory plan.
        number: number of the engine among those of all servers, for log lines; None: there is only
            one.
        is_held_up: returns True while the engine may stand still, since it waits for another one.
        blocker: returns the process of the engine that this one waits for; that process is killed
            instead of this engine's. None: this engine waits for no other.
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
        is_held_up: Callable[[], bool] = lambda: False,
        blocker: Callable[[], EngineProcess | None] = lambda: None,
    ) -> None:
        self._is_held_up, self._blocker = is_held_up, blocker
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
        """Number of consecutive engines that died before they produced a token."""
        self._suspects: dict[str, _Suspect] = {}
        self._suspect_of: dict[str, str] = {}
        """Request ids of suspects by the ids of their answers."""
        self._trials: deque[str] | None = None
        """Suspects: the first one is on trial, the others wait. None: no trials."""
        self._tried: set[str] = set()
        """Suspects that the current engine has received."""
        self._up = asyncio.Event()
        """Event that is set while an engine accepts requests, or after the final `_error`."""
        self._error: Exception | None = None
        self._replacing: asyncio.Task[list[EngineCoreOutput]] | None = None
        """Replacement task; it continues even if no caller waits for it."""
        self._listening = False
        """True if a caller reads the engine's outputs."""
        self._began: tuple[float, str, int] | None = None
        """Start, cause and number of requests of the current replacement."""
        self._started = time.monotonic()
        self._load_seconds = 0.0
        """Loading time of the first engine."""
        self._watcher: asyncio.Task[None] | None = None
        self._worker_pids: list[int] = []
        self._first = first
        self._is_victim = False
        """True after `restart`, until another engine is started."""
        self._num_changes = 0
        """Number of pending calls that may silence the engine for a long time."""
        self._process = launcher.launch(first, engine_index)
        self._client = AsyncMPClient(self._process)

    @cached_property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Future that resolves after the first load of the model; `EngineDeadError` if it fails."""
        return asyncio.get_running_loop().create_future()

    @property
    def process(self) -> EngineProcess:
        """The engine process."""
        return self._client.process

    @property
    def pid(self) -> int:
        """Id of the engine process."""
        return self._client.process.pid

    @property
    def pids(self) -> list[int]:
        """Ids of the engine processes, as in clients of several engines."""
        return [self.pid]

    @property
    def family(self) -> list[int]:
        """Ids of the engine process and its workers; without workers on other machines."""
        return [self.pid, *(self._worker_pids if self.pid > 0 else [])]

    @property
    def up(self) -> bool:
        """True if an engine has its model loaded."""
        return self._error is None and self._up.is_set()

    @property
    def missing(self) -> list[int]:
        """Always empty: the engine is on this machine, or its node has joined."""
        return []

    @property
    def down(self) -> dict[int, str]:
        """State of the engine by its number, if it is not serving."""
        return {} if self.up else {self._number or 0: "is being started"}

    @property
    def serving(self) -> bool:
        """True if a new request is computed at once, rather than after trials."""
        return self.up and self._trials is None

    @property
    def elastic(self) -> None:
        """None: the number of engines is fixed."""

    async def pages(self) -> list[bytes]:
        """Return []: there is no other front end."""
        return []

    def family_of(self, index: int) -> list[int]:
        """Implement `WatchedClient`."""
        return self.family

    def engine_of(self, request_id: str) -> int | None:
        """Implement `WatchedClient`."""
        return 0

    def holder_of(self, request_id: str) -> None:
        """Return None: there is one engine."""

    def deaths_of(self, request_id: str) -> int:
        """Return the number of consecutive deaths with a request in flight."""
        suspect = self._suspects.get(request_id)
        return 0 if suspect is None else suspect.deaths

    async def adopt(self, request: EngineCoreRequest, deaths: int) -> None:
        """Accept a request of another engine that has died, with its `deaths_of` there."""
        if deaths:
            self._suspects[request.request_id] = _Suspect(set(request.child_ids), deaths)
            self._suspect_of |= dict.fromkeys(request.child_ids, request.request_id)
        await self.add_request(request)

    async def get_output(self) -> EngineCoreOutputs:
        """Return outputs; raise only errors that another engine cannot repair."""
        while True:
            if self._watcher is None:
                self._begin_watch()
            if self._replacing is not None:
                failed = await asyncio.shield(self._replacing)
                self._replacing = None
                # The new one has no statistics yet.
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
        """Implement `WatchedClient`; return None if outputs need more processing here."""
        if self._watcher is None or self._replacing is not None or self._client.closed:
            return None
        return None if self._fruitless or self._suspects else self._client.get_output_nowait()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; during trials, or without an engine, it waits in the records."""
        if self._trials is None and not self._client.closed:
            await self._client.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        for request_id in request_ids:
            self._note_end(request_id)
        if not self._client.closed:  # otherwise the replacement uses the records
            await self._client.abort_requests(request_ids)
            await self._go_on_with_trials()

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method, after waiting for an engine.

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

    def restart(self, reason: str) -> None:
        """Kill the engine, so that it is started again; neither it nor a request is the cause."""
        self._is_victim = True
        self._client.process.kill(reason, is_victim=True)

    def fail_calls(self, error: Exception) -> None:
        """Fail all pending and future calls."""
        self._error = error
        self._up.set()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved
        self._client.fail_calls(error)

    async def shutdown(self) -> None:
        """Implement `EngineClient`."""
        for task in (self._watcher, self._replacing):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})  # then it starts no more processes
        self._launcher.shutdown()
        await self._client.shutdown()

    def close(self) -> None:
        """Shut down without an event loop."""
        self._launcher.shutdown()
        self._client.close()
        self._client.process.shutdown()

    def _begin_watch(self) -> None:
        """Start to watch the current engine."""
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
                "%s; another one was ready after %.1f s (requests that continue: %d)",
                reason,
                seconds,
                count,
            )
            self._on_recovery(Recovery(reason, count, seconds, self._index))

    async def _replace(self, error: EngineDeadError) -> list[EngineCoreOutput]:
        """Replace the engine; return the ends of failed requests.

        Raises:
            EngineDeadError: the engine could never be started, or died too often.
            NodeMissingError: the engine's node is lost.
        """
        noticed = time.monotonic()
        was_up = self.up
        self._up.clear()
        self._worker_pids = []
        assert self._watcher is not None
        self._watcher.cancel()
        if not (self.ready.done() or self._is_victim):
            raise error
        self._note_restart(noticed, error)
        self._began = self._began or (noticed, str(error), 0)
        # Find it now: later requests were not in flight.
        theirs = was_up and not isinstance(error, EngineStoppedError)
        failed = self._find_culprit(str(error)) if theirs else []
        self._client.fail_calls(
            StepFailedError("The engine was started again before it answered; try again.")
        )
        given_up = {output.request_id for output in failed}
        moved = await self._on_death(given_up)
        await self._client.shutdown(timeout=0.0)
        while True:
            if self._fruitless:
                self._logger.warning("%s again before it produced output", error)
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
        self._is_victim = False
        ready = self.ready.result() if self.ready.done() else self._first
        self._process = process = self._launcher.launch(ready, self._index)
        try:
            return AsyncMPClient(process)
        except OSError:
            process.shutdown(0.0)
            raise

    def _note_restart(self, now: float, error: EngineDeadError) -> None:
        """Count a restart.

        Raises:
            EngineDeadError: the limit is exceeded.
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
        """Record the requests in flight; return the end of the one that killed the engine."""
        in_flight = self._unfinished()
        if self._trials is not None:
            in_flight = [r for r in in_flight if r.request_id in self._tried]
        for request in in_flight:
            self._suspects.setdefault(request.request_id, _Suspect()).deaths += 1
        if self._trials is not None:  # all others in flight were cleared
            in_flight = [r for r in in_flight if r.request_id == self._trials[0]]
        if len(in_flight) != 1:
            return []
        suspect = self._suspects[in_flight[0].request_id]
        suspect.deaths_alone += 1
        if suspect.deaths_alone < _CULPRIT + (suspect.num_outputs > 0):
            return []
        culprit = in_flight[0].child_ids[0]  # this ends its siblings, too
        self._logger.error("request %s is given up: %s while it was in flight", culprit, reason)
        return [
            EngineCoreOutput(
                culprit,
                [],
                finish_reason=FinishReason.ERROR,
                error="The engine died repeatedly with this request in flight, so it is "
                f"given up: {reason}.",
                error_kind="GivenUpError",
            )
        ]

    async def _hand_in(self, failed: set[str], moved: int) -> None:
        """Submit the live requests, or the first suspect, to the new engine.

        Args:
            failed: ids of failed answers.
            moved: number of answers that other engines now make.
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
        """Record outputs: a request with enough of them is no longer a suspect."""
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
        """Record the end of an answer; after its last answer a request is no longer a suspect."""
        request_id = self._suspect_of.pop(answer, "")
        suspect = self._suspects.get(request_id)
        if suspect is not None:
            suspect.answers.discard(answer)
            if not suspect.answers:
                del self._suspects[request_id]

    async def _go_on_with_trials(self) -> None:
        """Send the next suspect, or all other requests, once the engine has survived one."""
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
        """Kill a process that has stopped or hangs, by periodic queries of its progress.

        Time is counted in sleep intervals, so that suspending the machine has no effect.
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
            stuck = waits and not self._is_held_up() and stats.num_scheduled_tokens == num_scheduled
            stalled = stalled + interval if stuck else 0.0
            if stalled >= self._progress_timeout:
                reason = f"no step for {stalled:.1f} s although requests are waiting"
                self._kill(client.process, reason)
                stalled = 0.0
            num_scheduled = stats.num_scheduled_tokens
            await asyncio.sleep(interval)

    async def _wait_for_model(self, client: AsyncMPClient, interval: float) -> None:
        """Wait for the model; kill a stopped process, or a replacement that is too slow."""
        limit = self._progress_timeout + _START_SECONDS + _LOADING * self._load_seconds
        waited = 0.0
        while not (await asyncio.wait({client.ready}, timeout=interval))[0]:
            waited += interval if self._listening else 0.0
            self._process.kill_if_stopped(interval, self._progress_timeout / 2)
            if self.ready.done() and waited >= limit:
                client.process.kill(f"the model was not loaded after {waited:.1f} s")
        client.ready.result()

    async def _ask(self, client: AsyncMPClient, interval: float) -> SchedulerStats:
        """Query the engine's progress; kill the process if it does not answer in time."""
        answer, silent = asyncio.ensure_future(client.call_utility("stats")), 0.0
        try:
            while not (await asyncio.wait({answer}, timeout=interval))[0]:
                if self._listening and not self._num_changes and not self._is_held_up():
                    silent += interval
                self._process.kill_if_stopped(interval, self._progress_timeout / 2)
                if silent >= self._progress_timeout:
                    self._kill(client.process, f"the engine has not answered for {silent:.1f} s")
                    silent = 0.0
            return msgspec.convert(answer.result(), SchedulerStats)
        finally:
            answer.cancel()

    def _kill(self, process: EngineProcess, reason: str) -> None:
        """Kill a process that hangs, or the one that it waits for."""
        blocker = self._blocker()
        if blocker is not None:
            process, reason = blocker, f"another engine waits for this one: {reason}"
        process.kill(reason)


def _retrieve(watcher: asyncio.Task[None]) -> None:
    """Log unexpected errors of a watcher; an engine's death is reported elsewhere."""
    error = None if watcher.cancelled() else watcher.exception()
    if error is not None and not isinstance(error, EngineDeadError | StepFailedError):
        logger.error("the engine is not watched any more", exc_info=error)
