"""The engine core: scheduler and executor at work, step by step."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.clock import now
from octavo.device import trim_memory
from octavo.errors import EngineDeadError, ProfilerError, RequestError, UnsupportedError
from octavo.executor.base import Executor, StepHandle
from octavo.kv_cache.hashing import make_block_hasher
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from octavo.profiler import Profiler, span
from octavo.request import Request, RequestStatus, fan_out
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

UTILITIES = frozenset(
    {
        "reset_prefix_cache",
        "stats",
        "trim_memory",
        "check_integrity",
        "start_profile",
        "stop_profile",
    }
)
"""Methods that a front end may call by their names."""


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
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.structured_output = structured_output
        self._clock = clock
        self._profiler = profiler
        self._engine_index = engine_index
        self._block_hasher = make_block_hasher(scheduler.kv_cache_config.block_size)
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_scheduled = 0
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that have not been handed out."""

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queues the n requests of a core request; what can never be served gets an error."""
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
        )

    def wait(self, seconds: float) -> None:
        """Waits for a grammar that is being compiled, where that is all there is to do.

        Args:
            seconds: at most that long.
        """
        if not self.has_work() and self.structured_output is not None:
            self.structured_output.wait(seconds)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits for tokens."""
        return bool(self._outputs) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedules as far ahead as allowed, then takes in the oldest step's result.

        A step that fails as a whole fails the requests in it; the engine goes on.
        """
        if self.structured_output is not None and self.structured_output.has_finished:
            self._take_grammars()
        took = False
        while True:
            newest = self._in_flight[-1] if self._in_flight else None
            if newest is not None and newest.result is None:
                # A grammar must know all tokens so far; the forward pass is under way meanwhile.
                while len(self._in_flight) > 1:
                    self._take_result()
                    took = True
                newest.result = newest.handle.sample(self._ask_grammars(newest))
            free = len(self._in_flight) < self.executor.max_in_flight
            if took or not free or not self.scheduler.has_requests():
                break
            self._schedule_step()
        if self._in_flight and not took:
            self._take_result()
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
        step = _StepInFlight(self._num_scheduled, work, self.executor.execute(work))
        if not any(request.has_grammar for request in work.scheduled_reqs):
            step.result = step.handle.sample()
        self._in_flight.append(step)

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
        """Takes in the oldest step's result."""
        step = self._in_flight[0]
        assert step.result is not None
        try:
            with span("wait") as note:
                note(step=step.number)
                result = step.result.result()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("a step failed, and its requests with it")
            message = f"The step failed: {type(error).__name__}: {error}"
            self._outputs += self.scheduler.fail_step(step.work, message)
        else:
            with span("update_from_output") as note:
                note(step=step.number, requests=len(step.work.scheduled_reqs))
                self._outputs += self.scheduler.update_from_output(step.work, result)
        # Not before: an interrupt (Ctrl-C) while waiting must not lose the step.
        self._in_flight.popleft()

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

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if running requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

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
