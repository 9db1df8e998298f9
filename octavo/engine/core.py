"""The engine core: scheduler and executor at work, step by step."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from octavo.errors import (
    EngineDeadError,
    ProfilerError,
    RequestError,
    SleepError,
    UnsupportedError,
)
from octavo.executor.base import Executor, StepHandle
from octavo.kv_cache.hashing import make_block_hasher, prompt_embeds_keys
from octavo.kv_connector.inbox import TransferInbox
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GrammarOutput,
    ModelRunnerOutput,
    PauseMode,
    SchedulerOutput,
)
from octavo.observability.profiler import Profiler, span
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.request import Request, RequestStatus, fan_out
from octavo.scheduler.listener import StepListener
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_output.manager import StructuredOutputManager
from octavo.system.clock import now
from octavo.system.device import trim_memory

logger = logging.getLogger(__name__)

UTILITIES = frozenset(
    {
        "reset_prefix_cache",
        "is_sleeping",
        "sleep",
        "stats",
        "trim_memory",
        "wake_up",
        "check_integrity",
        "start_profile",
        "stop_profile",
    }
)
"""Methods that a front end may call by their names."""

_MEMORY = frozenset({"weights", "kv_cache"})
"""What sleeps, by vLLM's tags."""
_TAGS = _MEMORY | {"scheduling"}


@dataclass(slots=True)
class _StepInFlight:
    """A step that the executor has, and the result that it will have."""

    number: int
    """From 1."""
    work: SchedulerOutput
    handle: StepHandle
    result: Future[ModelRunnerOutput] | None = None
    """None: it is not to be sampled yet, as it waits for what grammars allow."""


class EngineCore:
    """Takes checked requests, runs steps, gives token ids. See `make_engine_core`.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        clock: the time in seconds, as messages have it; the scheduler's.
        structured_output: grammars; None: requests with one are refused.
        profiler: records profiles; None: there are none.
        engine_index: see `EngineCoreOutputs`.
        enable_sleep_mode: whether `sleep` may give memory back.
        listeners: watch the steps; closed by `shutdown`.
        transfers: what workers have finished of what the scheduler's KV connector asked for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = now,
        structured_output: StructuredOutputManager | None = None,
        profiler: Profiler | None = None,
        engine_index: int = 0,
        enable_sleep_mode: bool = False,
        listeners: Sequence[StepListener] = (),
        transfers: TransferInbox | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.transfers = transfers
        self.executor = executor
        self.structured_output = structured_output
        self._clock = clock
        self._profiler = profiler
        self._engine_index = engine_index
        self._block_hasher = make_block_hasher(
            scheduler.kv_cache_config.block_size, prompt_embeds_keys
        )
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_scheduled = 0
        self._enable_sleep_mode = enable_sleep_mode
        self._asleep: frozenset[str] = frozenset()
        """What of `_MEMORY` sleeps."""
        self._same_weights = True
        """Whether those that wake up must be those that fell asleep."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that have not been handed out."""
        self._listeners = listeners

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queues the n requests of a core request; what can never be served gets an error."""
        for listener in self._listeners:
            listener.on_add(core_request)
        requests = fan_out(
            core_request, self._block_hasher, enable_prefix_caching=self.scheduler.enable_caching
        )
        try:
            for request in requests:
                self._add_request(request)
        except RequestError as error:  # as true of its siblings: the front end ends them all
            self._outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_kind=type(error).__name__,
                )
            )

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests, in whatever state they are; unknown ones are ignored."""
        request_ids = list(request_ids)
        for listener in self._listeners:
            listener.on_abort(request_ids)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _add_request(self, request: Request) -> None:
        """Queues a request; with a grammar it waits until this is compiled."""
        if request.sampling_params.grammar is None:
            self.scheduler.add_request(request)
            return
        if self.structured_output is None:
            raise UnsupportedError(
                "This engine has no tokenizer, which structured outputs need.",
                "structured_outputs",
            )
        request.status = RequestStatus.WAITING_FOR_FSM
        self.scheduler.add_request(request)
        try:
            if self.structured_output.add(request):
                self.scheduler.set_ready(request.request_id)
        except RequestError:
            self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
            raise

    def _take_grammars(self) -> None:
        """Queues the requests whose grammars are compiled; those that have none fail."""
        assert self.structured_output is not None
        for request, error in self.structured_output.take_finished():
            if request.status != RequestStatus.WAITING_FOR_FSM:
                continue  # it has ended meanwhile
            if error is None:
                self.scheduler.set_ready(request.request_id)
            else:
                kind = type(error).__name__
                self.scheduler.fail_request(request.request_id, error.message, kind)

    def has_work(self) -> bool:
        """Whether `step` would do or bring anything."""
        return bool(
            self._in_flight
            or self._outputs
            or self.scheduler.has_requests()
            or (self.structured_output is not None and self.structured_output.has_finished)
            or (self.transfers is not None and self.transfers.has_finished)
        )

    def wait(self, seconds: float) -> None:
        """Waits for a grammar that is being compiled, or blocks that are loaded, where there is
        nothing else to do.

        Args:
            seconds: at most that long.
        """
        if self.has_work():
            return
        if self.transfers is not None and self.scheduler.num_loads:
            self.transfers.wait(seconds)
        elif self.structured_output is not None:
            self.structured_output.wait(seconds)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits for tokens."""
        return bool(self._outputs) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedule as far ahead as allowed, then process the oldest step's result.

        A step that fails as a whole fails the requests in it; the engine goes on.
        """
        self._queue_ready_requests()
        processed = self._run_ahead()
        if self._in_flight and not processed:
            self._take_result()
        outputs = self._make_outputs()
        for listener in self._listeners:
            listener.on_outputs(outputs, is_idle=not self.has_work())
        return outputs

    def _queue_ready_requests(self) -> None:
        """Queue the requests with compiled grammars or loaded KV blocks."""
        if self.structured_output is not None and self.structured_output.has_finished:
            self._take_grammars()
        if self.transfers is not None and self.transfers.has_finished:
            self.scheduler.update_connector_output(self.transfers.take())

    def _run_ahead(self) -> bool:
        """Schedule and sample as many steps as the executor accepts.

        Returns:
            True if a grammar needed the results of steps, which are processed now.
        """
        took = False
        while True:
            newest = self._in_flight[-1] if self._in_flight else None
            if newest is not None and newest.result is None:
                # A grammar must know all tokens so far; the forward pass is under way meanwhile.
                while self._waits_for_tokens(newest):
                    self._take_result()
                    took = True
                self._sample(newest, self._ask_grammars(newest))
            free = len(self._in_flight) < self.executor.max_in_flight
            if took or not free or not self.scheduler.has_requests():
                break
            self._schedule_step()
        return took

    def _make_outputs(self) -> EngineCoreOutputs:
        """Return the outputs since the last call, with the scheduler's state."""
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.scheduler.make_stats(),
            timestamp=self._clock(),
            engine_index=self._engine_index,
        )

    def _schedule_step(self) -> None:
        """Schedules a step and hands it to the executor."""
        self._num_scheduled += 1
        with span("schedule") as note:
            work = self.scheduler.schedule()
            note(
                step=self._num_scheduled,
                requests=len(work.scheduled_reqs),
                tokens=work.total_num_scheduled_tokens,
            )
        for listener in self._listeners:
            listener.on_schedule(self._num_scheduled, work)
        step = _StepInFlight(self._num_scheduled, work, self.executor.execute(work))
        if not any(request.has_grammar for request in work.scheduled_reqs):
            self._sample(step, None)
        self._in_flight.append(step)

    def _waits_for_tokens(self, newest: _StepInFlight) -> bool:
        """Whether a step in flight before the newest one has requests of it with a grammar."""
        asking = {r.req_id for r in newest.work.scheduled_reqs if r.has_grammar}
        return any(
            request.req_id in asking
            for step in self._in_flight
            if step is not newest
            for request in step.work.scheduled_reqs
        )

    def _sample(self, step: _StepInFlight, grammar: GrammarOutput | None) -> None:
        """Start the sampling of a step."""
        step.result = step.handle.sample(grammar)
        if self._listeners:
            step.result.add_done_callback(lambda _: self._notify_computed(step.number))

    def _notify_computed(self, step: int) -> None:
        """Notify the listeners that a step has ended, in the order of steps."""
        for listener in self._listeners:
            listener.on_computed(step)

    def _ask_grammars(self, step: _StepInFlight) -> GrammarOutput | None:
        """What the grammars of a step's requests allow, once all earlier results are known."""
        assert self.structured_output is not None
        with span("grammar") as note:
            note(step=step.number)
            try:
                drafts = step.handle.drafts()
            except Exception:
                return None  # the step failed, as its result will say
            requests, most = [], self.scheduler.forced_per_request
            for scheduled in step.work.scheduled_reqs:
                request = self.scheduler.requests.get(scheduled.req_id)
                if request is None or request.status == RequestStatus.WAITING_FOR_FSM:
                    continue  # it has ended, and so may another one have its id
                if scheduled.has_grammar:
                    requests.append((request, most))
            output, errors = self.structured_output.make_output(requests, drafts)
            for req_id, forced in output.forced.items():
                # One of them, and as many as there are drafts, this step itself may bring.
                rest = len(forced) - 1 - len(drafts.get(req_id, ()))
                self.scheduler.requests[req_id].num_forced = min(max(0, rest), most)
            for request, message in errors.items():
                self.scheduler.fail_request(request.request_id, message)
            return output

    def _take_result(self) -> None:
        """Process the oldest step's result."""
        step = self._in_flight[0]
        assert step.result is not None
        begun = time.perf_counter()
        try:
            with span("wait") as note:
                note(step=step.number)
                result = step.result.result()
        except (EngineDeadError, MemoryError):
            raise  # the second: what else lacks memory nobody knows
        except Exception as error:
            logger.exception("a step failed, and its requests with it")
            self._notify_result(step.number, begun, failed=True)
            message = f"The step failed: {type(error).__name__}: {error}"
            self._outputs += self.scheduler.fail_step(step.work, message)
        else:
            self._notify_result(step.number, begun, failed=False)
            with span("update_from_output") as note:
                note(step=step.number, requests=len(step.work.scheduled_reqs))
                self._outputs += self.scheduler.update_from_output(step.work, result)
        # Not before: an interrupt (Ctrl-C) while waiting must not lose the step.
        self._in_flight.popleft()

    def _notify_result(self, step: int, begun: float, failed: bool) -> None:
        """Notify the listeners of a step's result; the wait for it began at `begun`."""
        waited = time.perf_counter() - begun
        for listener in self._listeners:
            listener.on_result(step, waited, failed)

    def seconds_to_deadline(self) -> float | None:
        """How long from now some request may have to be ended, though nothing runs; None: never."""
        deadline = self.scheduler.next_held_deadline
        return None if deadline == math.inf else max(0.0, deadline - self._clock())

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of `UTILITIES`; returns its result as plain values.

        Raises:
            ValueError: if it is none of them.
        """
        if method not in UTILITIES:
            raise ValueError(f"there is no utility method {method!r}")
        return msgspec.to_builtins(getattr(self, method)(*args))

    def stats(self) -> SchedulerStats:
        """State and counters of the scheduler."""
        return self.scheduler.make_stats()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes; see `Scheduler.reset_prefix_cache`."""
        if reset_running_requests:
            self._finish_steps()
        was_reset = self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        for listener in self._listeners:
            listener.on_reset()
        return was_reset

    def trim_memory(self) -> None:
        """Gives memory that was freed back to the system."""
        trim_memory()

    def check_integrity(self) -> None:
        """Checks the scheduler's and the cache's books.

        Raises:
            AssertionError: with what does not add up.
        """
        self.scheduler.check_integrity()

    def start_profile(self) -> None:
        """Begins to record spans of steps and kernels.

        Raises:
            ProfilerError: profiles are off, or one is being recorded.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        profiler.start()
        logger.info("recording a profile")

    def stop_profile(self) -> str:
        """Ends the profile; returns the path of the Chrome trace.

        Raises:
            ProfilerError: profiles are off, none is being recorded, or it cannot be written.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        return str(profiler.stop())

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> bool:
        """Computes nothing more until `wake_up`; requests that come meanwhile are held.

        The prefix cache is emptied, unless only the scheduling is paused.

        Args:
            level: 0 pauses the scheduling; 1 also gives the memory of weights and KV cache back to
                the system; 2 is 1, but `wake_up` takes the weights that are there by then.
            mode: what becomes of unfinished requests. abort: they end with what they have; wait:
                they are finished first; keep: they are held, and go on from their tokens.

        Returns:
            Whether it sleeps. Not yet: with mode="wait" there are requests to finish; call again.

        Raises:
            RequestError: level or mode is unknown.
            SleepError: the engine was made without sleep mode, and level is not 0; or it has a KV
                connector, and level is 2.
        """
        if level not in (0, 1, 2):
            raise RequestError(f"level={level!r} is not allowed; it is 0, 1 or 2.", "level")
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode={mode!r} is not allowed; it is abort, wait or keep.", "mode")
        if level and not self._enable_sleep_mode:
            raise SleepError(
                "This engine keeps its memory; start it with enable_sleep_mode "
                "(--enable-sleep-mode), or take level=0, which only pauses it."
            )
        if level == 2 and self.scheduler.has_connector:
            raise SleepError(
                "level=2 may bring other weights, and what kv_transfer_config keeps is of these; "
                "take level=1, or start the engine without kv_transfer_config."
            )
        if mode != "wait":
            self._finish_steps()
        self.scheduler.pause(mode)
        waiting = self.scheduler.waiting or self.scheduler.num_loads
        if self._in_flight or self.scheduler.running or waiting:
            return False
        if level:
            was_reset = self.reset_prefix_cache()
            assert was_reset, "blocks are in use though nothing runs"
            if self._asleep != _MEMORY:
                self.executor.collective_rpc("sleep")
            self._same_weights = level == 1 and (
                self._same_weights or "weights" not in self._asleep
            )
            self._asleep = _MEMORY
            trim_memory()
        logger.info("asleep", extra={"level": level, "held_requests": len(self.scheduler.requests)})
        return True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Takes memory up again; once all is there, requests are computed again.

        Args:
            tags: what: "weights", "kv_cache"; None: all. "scheduling": only what level 0 paused.

        Returns:
            Whether the engine is awake.

        Raises:
            RequestError: a tag is unknown.
            SleepError: others have the memory; the engine sleeps on.
            ModelError: the weights cannot be read, or at level 1 have changed; likewise.
        """
        tags = [tags] if isinstance(tags, str) else tags
        unknown = set(tags or ()) - _TAGS
        if unknown:
            raise RequestError(
                f"tags has {min(unknown)!r}, which does not sleep; take some of "
                f"{', '.join(sorted(_TAGS))}.",
                "tags",
            )
        woken = self._asleep if tags is None else self._asleep & set(tags)
        if "weights" in woken:
            same = self._same_weights
            needed, free = zip(*self.executor.collective_rpc("memory_to_reload"), strict=True)
            if sum(needed) > min(free):
                raise SleepError(
                    f"Weights and KV cache take {sum(needed) / 2**20:,.0f} MiB, and "
                    f"{min(free) / 2**20:,.0f} MiB are free; free some, and wake up again."
                )
            self.executor.collective_rpc("reload_weights", kwargs={"same": same})
            self._same_weights = True
        self._asleep -= woken
        if self._asleep:
            return False
        if self.scheduler.paused:
            self.scheduler.resume()
            logger.info("awake")
        return True

    def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level, or is about to."""
        return self.scheduler.paused

    def _finish_steps(self) -> None:
        """Takes in the results of all steps in flight."""
        while self._in_flight:
            step = self._in_flight[0]
            if step.result is None:  # the newest one: all results before it are known
                self._sample(step, self._ask_grammars(step))
            self._take_result()

    def _get_profiler(self) -> Profiler:
        if self._profiler is None:
            raise ProfilerError(
                "Profiles are off; start the engine with --profiler-dir DIR (profiler_dir=...)."
            )
        return self._profiler

    def _wait_for_steps(self) -> None:
        """Lets the workers finish what they have, so that a profile holds whole steps only."""
        wait([step.result for step in self._in_flight if step.result is not None])

    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""
        if self._profiler is not None and self._profiler.recording:
            self.stop_profile()
        self._in_flight.clear()
        if self.structured_output is not None:
            self.structured_output.shutdown()
        self.executor.shutdown()
        self.scheduler.shutdown()
        for listener in self._listeners:
            listener.close()
