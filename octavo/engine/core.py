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

from octavo.engine.adapters import AdapterInbox
from octavo.errors import (
    EngineDeadError,
    ProfilerError,
    RequestError,
    SleepError,
    StepLostError,
    UnsupportedError,
)
from octavo.executor.base import Executor, StepHandle
from octavo.kv_cache.block_map import BlockMap, make_block_map
from octavo.kv_cache.hashing import input_keys, make_block_hasher
from octavo.kv_connector.inbox import TransferInbox
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ExpertLoad,
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
        "block_map",
        "expert_counts",
        "reset_encoder_cache",
        "reset_mm_cache",
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
"""Memory that sleeps, by vLLM's tags."""
_TAGS = _MEMORY | {"scheduling"}


@dataclass(slots=True)
class _StepInFlight:
    """A step that the executor runs, and its future result."""

    number: int
    """Number of the step, counted from 1."""
    work: SchedulerOutput
    handle: StepHandle
    result: Future[ModelRunnerOutput] | None = None
    """Result of the step; None: its sampling still waits for the bitmask of grammars."""
    is_lost: bool = False
    """True if its requests are computed again, since an earlier step was lost."""


class EngineCore:
    """Loop that runs checked requests step by step and returns token ids.

    `make_engine_core` creates one.

    Args:
        scheduler: chooses the requests of each step.
        executor: runs the steps.
        clock: the scheduler's clock; returns seconds.
        structured_output: compiles grammars; None: requests with a grammar are rejected.
        profiler: records profiles; None: profiles are off.
        engine_index: see `EngineCoreOutputs`.
        enable_sleep_mode: True if `sleep` may free memory.
        listeners: observers of the steps; `shutdown` closes them.
        transfers: finished transfers of the scheduler's KV connector, as the workers report them.
        adapters: adapters that the workers have read; None: adapters are off.
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
        adapters: AdapterInbox | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.transfers = transfers
        self.adapters = adapters
        self.executor = executor
        self.structured_output = structured_output
        self._clock = clock
        self._profiler = profiler
        self._engine_index = engine_index
        self._block_hasher = make_block_hasher(scheduler.kv_cache_config.block_size, input_keys)
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_scheduled = 0
        self._enable_sleep_mode = enable_sleep_mode
        self._asleep: frozenset[str] = frozenset()
        """The sleeping part of `_MEMORY`."""
        self._same_weights = True
        """True if `wake_up` must load the same weights that `sleep` freed."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that `step` has not returned yet."""
        self._expert_load: ExpertLoad | None = None
        """Load of the experts after the last step."""
        self._listeners = listeners

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue the n requests of a core request; a request that can never run gets an error."""
        for listener in self._listeners:
            listener.on_add(core_request)
        requests = fan_out(
            core_request, self._block_hasher, enable_prefix_caching=self.scheduler.enable_caching
        )
        try:
            for request in requests:
                self._add_request(request)
        except RequestError as error:  # applies to all n requests: the front end ends them all
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
        """End requests in any state; ignore unknown ids."""
        request_ids = list(request_ids)
        for listener in self._listeners:
            listener.on_abort(request_ids)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _add_request(self, request: Request) -> None:
        """Queue a request; a request with a grammar waits until its grammar is compiled."""
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
        """Queue the requests with compiled grammars; fail those with grammars that failed."""
        assert self.structured_output is not None
        for request, error in self.structured_output.take_finished():
            if request.status != RequestStatus.WAITING_FOR_FSM:
                continue  # the request has ended meanwhile
            if error is None:
                self.scheduler.set_ready(request.request_id)
            else:
                kind = type(error).__name__
                self.scheduler.fail_request(request.request_id, error.message, kind)

    def has_work(self) -> bool:
        """Return True if `step` would run or return anything."""
        return bool(
            self._in_flight
            or self._outputs
            or self.scheduler.has_requests()
            or (self.structured_output is not None and self.structured_output.has_finished)
            or (self.transfers is not None and self.transfers.has_finished)
            or (self.adapters is not None and self.adapters.has_finished)
            or self._is_wanted
        )

    @property
    def _is_wanted(self) -> bool:
        """True if other engines wait for this one's experts."""
        return self.executor.wave is not None and self.executor.wave.wanted

    def wait(self, seconds: float) -> None:
        """Wait for loads of blocks or adapters, or for grammars, if there is no other work.

        Args:
            seconds: the longest wait.
        """
        if self.has_work():
            return
        if self.transfers is not None and self.scheduler.num_loads:
            self.transfers.wait(seconds)
        elif self.adapters is not None and self.scheduler.num_loading_adapters:
            self.adapters.wait(seconds)
        elif self.structured_output is not None:
            self.structured_output.wait(seconds)

    def has_unfinished_requests(self) -> bool:
        """Return True if any request still waits for tokens."""
        return bool(self._outputs) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedule as far ahead as allowed, then process the oldest step's result.

        A step that fails as a whole fails its requests; the engine continues.
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
        """Queue the requests with compiled grammars, loaded KV blocks or loaded adapters."""
        if self.structured_output is not None and self.structured_output.has_finished:
            self._take_grammars()
        if self.transfers is not None and self.transfers.has_finished:
            self.scheduler.update_connector_output(self.transfers.take())
        if self.adapters is not None and self.adapters.has_finished:
            for loaded in self.adapters.take():
                self.scheduler.update_adapter(loaded)

    def _run_ahead(self) -> bool:
        """Schedule and sample steps until the executor is full.

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
            if took or not free:
                break
            if not self.scheduler.has_requests() and (self._in_flight or not self._is_wanted):
                break
            if self._in_flight and self.scheduler.only_awaits_results and not self._is_wanted:
                break
            self._schedule_step()
        return took

    def _make_outputs(self) -> EngineCoreOutputs:
        """Return the outputs since the last call, with the scheduler's state."""
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(),
            timestamp=self._clock(),
            engine_index=self._engine_index,
        )

    def _schedule_step(self) -> None:
        """Schedule a step and pass it to the executor."""
        self._num_scheduled += 1
        for listener in self._listeners:
            listener.on_begin(self._num_scheduled)
        with span("schedule") as note:
            work = self.scheduler.schedule()
            note(
                step=self._num_scheduled,
                requests=len(work.scheduled_reqs),
                tokens=work.total_num_scheduled_tokens,
            )
        # Steps that are in flight take part already.
        work.serves = not work.scheduled_reqs and not self._in_flight and self._is_wanted
        for listener in self._listeners:
            listener.on_schedule(self._num_scheduled, work)
        step = _StepInFlight(self._num_scheduled, work, self.executor.execute(work))
        if not any(request.has_grammar for request in work.scheduled_reqs):
            self._sample(step, None)
        self._in_flight.append(step)

    def _waits_for_tokens(self, newest: _StepInFlight) -> bool:
        """Return True if an earlier step in flight has a grammar request of the newest step."""
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
        """Return the tokens that a step's grammars allow; all earlier results must be known."""
        assert self.structured_output is not None
        if step.is_lost:
            return None
        with span("grammar") as note:
            note(step=step.number)
            try:
                drafts = step.handle.drafts()
            except Exception:
                return None  # the step failed; its result will raise the error
            requests, most = [], self.scheduler.forced_per_request
            for scheduled in step.work.scheduled_reqs:
                request = self.scheduler.requests.get(scheduled.req_id)
                if request is None or request.status == RequestStatus.WAITING_FOR_FSM:
                    continue  # the request has ended; a new one may have its id
                if scheduled.has_grammar:
                    requests.append((request, most))
            output, errors = self.structured_output.make_output(requests, drafts)
            for req_id, forced in output.forced.items():
                # This step itself may sample one of them, plus its number of drafts.
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
        except StepLostError:
            self._notify_result(step.number, begun, failed=True)
            for later in self._in_flight:
                later.is_lost = True
            self._outputs += self.scheduler.repeat_step(step.work)
        except (EngineDeadError, MemoryError):
            raise  # after a MemoryError the state of the process is unknown
        except Exception as error:
            logger.exception("a step failed, and its requests with it")
            self._notify_result(step.number, begun, failed=True)
            message = f"The step failed: {type(error).__name__}: {error}"
            self._outputs += self.scheduler.fail_step(step.work, message)
        else:
            self._notify_result(step.number, begun, False, result.sample_seconds)
            with span("update_from_output") as note:
                note(step=step.number, requests=len(step.work.scheduled_reqs))
                self._outputs += self.scheduler.update_from_output(step.work, result)
                self._expert_load = result.expert_load or self._expert_load
        # Not before: an interrupt (Ctrl-C) while waiting must not lose the step.
        self._in_flight.popleft()

    def _notify_result(
        self, step: int, begun: float, failed: bool, sample_seconds: float = 0.0
    ) -> None:
        """Notify the listeners of a step's result; the wait for it began at `begun`."""
        waited = time.perf_counter() - begun
        for listener in self._listeners:
            listener.on_result(step, waited, failed, sample_seconds)

    def seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next deadline of a held request; None: no deadline."""
        deadline = self.scheduler.next_held_deadline
        return None if deadline == math.inf else max(0.0, deadline - self._clock())

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of `UTILITIES` and return its result as plain values.

        Raises:
            ValueError: `method` is not in `UTILITIES`.
        """
        if method not in UTILITIES:
            raise ValueError(f"the utility method {method!r} does not exist")
        return msgspec.to_builtins(getattr(self, method)(*args), builtin_types=(bytes,))

    def stats(self) -> SchedulerStats:
        """Return the state and counters of the scheduler."""
        stats, load = self.scheduler.make_stats(), self._expert_load
        if load is not None:
            stats.num_experts = load.num_experts
            stats.expert_tokens, stats.most_expert_tokens = load.tokens, load.most
            stats.num_expert_rearrangements = load.num_rearrangements
            stats.mean_process_tokens, stats.most_process_tokens = load.process_tokens
        return stats

    def block_map(self) -> dict[int, BlockMap]:
        """Return the map of the KV cache, by the index of this engine."""
        return {self._engine_index: make_block_map(self.scheduler.kv_cache_manager)}

    def expert_counts(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Return the tokens of each expert since the start, with the layer, by this engine's index.

        The call waits for the steps in flight.
        """
        ranks: list[list[tuple[int, list[int]]]] = self.executor.collective_rpc("expert_loads")
        return {self._engine_index: sorted(pair for rank in ranks for pair in rank)}

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `Scheduler.reset_prefix_cache`."""
        if reset_running_requests:
            self._finish_steps()
        was_reset = self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        for listener in self._listeners:
            listener.on_reset()
        return was_reset

    def reset_encoder_cache(self) -> bool:
        """Forget the results of encoders; see `Scheduler.reset_encoder_cache`."""
        return self.scheduler.reset_encoder_cache()

    def reset_mm_cache(self) -> None:
        """Do nothing: the process of a core, not the core, keeps items; see `KeptItems`."""

    def trim_memory(self) -> None:
        """Return freed memory to the system."""
        trim_memory()

    def check_integrity(self) -> None:
        """Check the consistency of the scheduler's and the cache's state.

        Raises:
            AssertionError: the state is inconsistent; the message names the error.
        """
        self.scheduler.check_integrity()

    def start_profile(self) -> None:
        """Start to record spans of steps and kernels.

        Raises:
            ProfilerError: profiles are off, or one is being recorded.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        profiler.start()
        logger.info("recording a profile")

    def stop_profile(self) -> str:
        """End the profile and return the path of the Chrome trace.

        Raises:
            ProfilerError: profiles are off, none is being recorded, or the trace cannot be written.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        return str(profiler.stop())

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> bool:
        """Stop computing until `wake_up`; hold the requests that arrive meanwhile.

        Levels 1 and 2 also empty the prefix cache.

        Args:
            level: 0 pauses the scheduling; 1 also returns the memory of weights and KV cache to
                the system; 2 is like 1, but `wake_up` may load changed weights.
            mode: treatment of unfinished requests. abort: end them with their current output;
                wait: finish them first; keep: hold them and continue them later.

        Returns:
            True if the engine sleeps. False while requests (mode="wait") or loads of KV blocks
            are unfinished: run steps and call again.

        Raises:
            RequestError: level or mode is unknown.
            SleepError: level is not 0 and sleep mode is disabled, or level is 2 and the engine
                has a KV connector.
        """
        if level not in (0, 1, 2):
            raise RequestError(f"level={level!r} is not allowed; it is 0, 1 or 2.", "level")
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode={mode!r} is not allowed; it is abort, wait or keep.", "mode")
        if level and not self._enable_sleep_mode:
            raise SleepError(
                "This engine keeps its memory; start it with enable_sleep_mode "
                "(--enable-sleep-mode), or use level=0, which only pauses it."
            )
        if level == 2 and self.scheduler.has_connector:
            raise SleepError(
                "level=2 may bring other weights, but the KV connector's cache is for the current "
                "ones; use level=1, or start the engine without kv_transfer_config."
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
        """Allocate the memory again; resume the scheduling once nothing sleeps.

        Args:
            tags: the parts to wake up, "weights" or "kv_cache"; None: all. "scheduling" alone
                only ends level 0.

        Returns:
            True if the engine is awake.

        Raises:
            RequestError: a tag is unknown.
            SleepError: too little memory is free; the engine stays asleep.
            ModelError: the weights cannot be read, or have changed since `sleep` at level 1; the
                engine stays asleep.
        """
        tags = [tags] if isinstance(tags, str) else tags
        unknown = set(tags or ()) - _TAGS
        if unknown:
            raise RequestError(
                f"tags has {min(unknown)!r}, which does not sleep; use some of "
                f"{', '.join(sorted(_TAGS))}.",
                "tags",
            )
        woken = self._asleep if tags is None else self._asleep & set(tags)
        if "weights" in woken:
            same = self._same_weights
            needed, free = zip(*self.executor.collective_rpc("memory_to_reload"), strict=True)
            if sum(needed) > min(free):
                raise SleepError(
                    f"Weights and KV cache need {sum(needed) / 2**20:,.0f} MiB, but only "
                    f"{min(free) / 2**20:,.0f} MiB are free; free some, then call wake_up again."
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
        """Return True if the engine sleeps at any level, or is about to."""
        return self.scheduler.paused

    def _finish_steps(self) -> None:
        """Process the results of all steps in flight."""
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
        """Wait for the sampled steps in flight, so that a profile contains only whole steps."""
        wait([step.result for step in self._in_flight if step.result is not None])

    def shutdown(self) -> None:
        """End the workers and free their memory. A second call is harmless."""
        if self._profiler is not None and self._profiler.recording:
            self.stop_profile()
        self._in_flight.clear()
        if self.structured_output is not None:
            self.structured_output.shutdown()
        self.executor.shutdown()
        self.scheduler.shutdown()
        for listener in self._listeners:
            listener.close()
