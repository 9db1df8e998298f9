"""The scheduler: what each step computes, and what becomes of its results.

There is no prefill phase and no decode phase. Each request's `num_computed_tokens` catches up with
its tokens (drafts to verify included) within one token budget a step; that alone gives continuous
batching, chunked prefill, prefix hits, speculation and recovery after preemption.

Steps may be scheduled before the results of earlier ones are known (async scheduling). The tokens
that they will sample count as placeholders: they have positions and slots, but no ids here; the
worker, which executes steps in order, has the ids when it needs them. Drafts are the worker's as
well: here a request only gets places for them. While these are in flight nobody knows how many
drafts there were and how many of them are right: the request is scheduled on as if all places had
brought a token, so that it has slots enough wherever it turns out to stand; the worker computes
from there, and the counts here are put right when the results come.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.config import SchedulerConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.kv_cache.events import AnyKVEvent
from octavo.kv_cache.groups import KVCacheConfig, max_blocks_per_request
from octavo.kv_cache.manager import KVCacheBlocks, KVCacheManager
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.messages import (
    EngineCoreOutput,
    FinishReason,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    PauseMode,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
)
from octavo.request import QueueKey, Request, RequestStatus
from octavo.scheduler.costs import PrefillCosts
from octavo.scheduler.fairness import CREDIT_STEPS, OUTPUT_WEIGHT, PROMPT_WEIGHT, TenantCounters
from octavo.scheduler.observer import SchedulerObserver, WaitReason
from octavo.scheduler.queue import Arrivals, WaitingQueue
from octavo.scheduler.speculation import DraftLengths
from octavo.structured_output.base import MAX_FORCED
from octavo.system.clock import now

# Waits that end by `set_ready`; requests in them do not queue.
logger = logging.getLogger(__name__)

_DRAFTING_INTERVAL = 60.0  # seconds between log lines about drafting
_HELD = (
    RequestStatus.WAITING_FOR_FSM,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_WAKE_UP,
)


@dataclass(slots=True)
class _ScheduledStep:
    """A step being scheduled, then in flight."""

    output: SchedulerOutput
    budget: int
    """Tokens that may still be added."""
    draft_budget: int
    """Places for drafts among them."""
    drafts_per_request: int
    forced_per_request: int
    """Drafts of its grammar that a request may have; see `Scheduler.forced_per_request`."""
    scheduled_at: float
    preempted: bool = False
    forced: bool = False
    """Whether grammars have drafts in it."""
    entries: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, first position computed, tokens it samples at most; 0: none), in batch order."""
    busy: frozenset[Request] = frozenset()
    """Requests that would hold the step up: another stage has yet to sample their last tokens."""


class Scheduler:
    """Decides what runs, and follows each request from arrival to its end.

    The running requests are kept in the order of service, and requests are scheduled in that
    order while the last one is preempted if blocks run out. So a request that is preempted has not
    been scheduled in the same step yet, and the first one always makes progress.

    For each `schedule()` the caller must call `update_from_output` (or `fail_step`), in the same
    order, with an empty `ModelRunnerOutput` if the step had nothing to compute.

    Args:
        config: the scheduler's settings.
        kv_cache_config: shape of the KV cache.
        max_model_len: most tokens of a request, prompt and output.
        max_num_batched_tokens: token budget of a step.
        enable_caching: keep KV blocks of known prefixes after their last user has gone.
        num_speculative_tokens: most drafts of a request in a step, beside those of grammars.
        max_num_drafts: most drafts of all requests in a step.
        num_stages: steps that are computed at the same time, one behind the other (pipeline
            parallelism).
        clock: the time in seconds, as requests' `deadline` has it.
        observer: is told why requests wait or are preempted.
        connector: the scheduler's half of a KV connector.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_caching: bool = True,
        num_speculative_tokens: int = 0,
        max_num_drafts: int = 0,
        num_stages: int = 1,
        clock: Callable[[], float] = now,
        observer: SchedulerObserver | None = None,
        connector: KVConnectorScheduler | None = None,
    ) -> None:
        self.config = config
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self._draft_lengths = DraftLengths(num_speculative_tokens)
        self._logged_pause, self._next_drafting_line = False, -math.inf
        self.max_num_drafts = max_num_drafts
        self.num_stages = num_stages
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = KVCacheManager(kv_cache_config, enable_caching)

        self.requests: dict[str, Request] = {}
        """All unfinished requests."""
        self.running: list[Request] = []
        """Those for which the worker holds a row, in order of service."""
        self._tenants = TenantCounters(CREDIT_STEPS * max_num_batched_tokens)
        self._in_order = False
        """Whether the next step looks at the order of service only, see `_share_prefill`."""
        self.waiting = WaitingQueue(self._tenants)
        self._held: dict[str, Request] = {}
        self.paused = False
        """Whether requests that come are held until `resume`."""
        self._in_flight: deque[_ScheduledStep] = deque()
        self._finished_req_ids: list[str] = []
        """Rows to be given up by the worker before the next step."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that came about outside of a step."""
        self._clock, self._observer = clock, observer
        self._connector = connector
        self._loads_kv = connector is not None and connector.transfer_config.loads
        self._costs = PrefillCosts()
        self._loaded_block_ids: list[int] = []
        self._loads_before: list[str] = []
        """Requests whose blocks are loaded before the step that is scheduled next."""
        """See `SchedulerOutput`: of the next step."""
        self._loading: dict[str, list[Request]] = {}
        """By the request that blocks are being loaded for: all that wait for them."""
        self._num_external_queries = self._num_external_hits = self._num_failed_loads = 0
        self._next_deadline = math.inf
        """No unfinished request has an earlier one."""
        self._arrivals = Arrivals(config.scheduling_policy)
        self._num_preemptions = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens_per_pos = [0] * num_speculative_tokens
        self._last_update = -math.inf

    def add_request(self, request: Request) -> None:
        """Takes in a request. One whose status is a wait is held until `set_ready`.

        Raises:
            ContextLengthError: if it can never be served: it does not fit the context, the KV
                cache, or (without chunked prefill) one step.
            RequestError: if its id is in use or its prompt is empty.
        """
        if request.request_id in self.requests:
            raise RequestError(f"Request id {request.request_id!r} is in use.", "request_id")
        self._check_fits(request)
        self._check_transfer(request)
        # The context is one more limit on the output; from here on there is only one.
        request.max_tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        request.queue_key = self._arrivals.next_key(request)
        self.requests[request.request_id] = request
        self._next_deadline = min(self._next_deadline, request.next_deadline)
        self._tenants.arrive(request.options.share)
        request.competes = True
        if self.paused and request.status == RequestStatus.WAITING:
            request.status = RequestStatus.WAITING_FOR_WAKE_UP
        if request.status in _HELD:
            self._held[request.request_id] = request
        else:
            self.waiting.push(request)

    def pause(self, mode: PauseMode) -> None:
        """Holds requests that come from now on, until `resume`.

        Args:
            mode: what becomes of those that are there. abort: they end, as their last outputs say.
                keep: they are held, too, and go on later from their tokens; no step may be in
                flight. wait: nothing, they go on.
        """
        self.paused = True
        if mode == "abort":
            for request in list(self.requests.values()):
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                self._outputs.append(
                    EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                )
            self._drop_finished_from_running()
        elif mode == "keep":
            while self.running:
                self._preempt(self.running.pop(), None)
            for request in list(self.waiting):
                self.hold(request.request_id, RequestStatus.WAITING_FOR_WAKE_UP)

    def resume(self) -> None:
        """Ends what `pause` began."""
        self.paused = False
        for request in list(self._held.values()):
            if request.status == RequestStatus.WAITING_FOR_WAKE_UP:
                self.set_ready(request.request_id)

    def hold(self, request_id: str, status: RequestStatus) -> None:
        """Takes a waiting request out of the queue until `set_ready`.

        Args:
            request_id: a request that waits.
            status: what it waits for, WAITING_FOR_FSM, ..._REMOTE_KVS or ..._WAKE_UP.
        """
        request = self.requests[request_id]
        assert status in _HELD, status
        self.waiting.remove(request)
        request.status = status
        self._held[request_id] = request

    def set_ready(self, request_id: str) -> None:
        """Ends a request's wait: it goes to its place in the queue. Ignored if it has finished.

        While the scheduler is paused, it waits for that to end.
        """
        request = self._held.get(request_id)
        if request is None:
            return
        if self.paused:
            request.status = RequestStatus.WAITING_FOR_WAKE_UP
        else:
            del self._held[request_id]
            request.status = RequestStatus.WAITING
            self.waiting.push(request)

    def fail_request(self, request_id: str, message: str, error_kind: str = "RequestError") -> None:
        """Ends a request, in any state, with an error that goes out with the next outputs.

        Args:
            request_id: the request; ignored if it has finished.
            message: what went wrong.
            error_kind: name of the error class in `octavo.errors`.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._outputs.append(self._fail(request, message, error_kind))
            self._drop_finished_from_running()

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """Ends requests from outside, in any state; ids of finished ones are ignored.

        Nothing is put out for them, and results of steps in flight are dropped.
        """
        assert status.finished, status
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
        self._drop_finished_from_running()

    def schedule(self) -> SchedulerOutput:
        """Puts together the next step; it may be empty."""
        now = self._clock()
        if now >= self._next_deadline:
            self._fail_expired(now)
        output = SchedulerOutput()
        step = _ScheduledStep(
            output,
            self.max_num_batched_tokens,
            self.max_num_drafts,
            self._choose_num_drafts(now) if self._draft_lengths.most else 0,
            self.forced_per_request,
            now,
        )
        if self.num_stages > 1:
            step.busy = self._find_busy()
        prefills = self._schedule_running(step, now)
        if prefills:
            self._share_prefill(step, now, prefills)
        if not step.preempted:
            while self.waiting and step.budget:
                request = self.waiting.peek()
                if not (self._admit(step, now, preempt=False) or request.status in _HELD):
                    break
            if self.waiting and not step.budget:
                self._note_wait(self.waiting.peek(), WaitReason.BUDGET)
        if step.busy and not step.entries:  # better than nothing
            step.busy = frozenset()
            self._schedule_running(step, now)
        output.total_num_scheduled_tokens = self.max_num_batched_tokens - step.budget
        output.blocks_to_copy = self.kv_cache_manager.take_blocks_to_copy()
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        if self._connector is not None:
            output.loaded_block_ids, self._loaded_block_ids = self._loaded_block_ids, []
            output.kv_loads_before, self._loads_before = self._loads_before, []
            metadata = self._connector.build_connector_meta(output)
            if metadata is not None:
                output.kv_connector_metadata = msgspec.msgpack.encode(metadata)
        if step.entries:
            self._in_flight.append(step)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Takes in the result of the oldest step in flight.

        A request in `errors` has failed by itself, after the forward pass: the KV of all tokens
        scheduled in the step is in the cache, as other requests rely on it.

        Returns:
            What is new for each request, in batch order.
        """
        outputs, self._outputs = self._outputs, []
        if not scheduler_output.scheduled_reqs:
            return outputs
        step = self._in_flight.popleft()
        assert step.output is scheduler_output, "steps must be updated in order"
        self._num_steps += 1
        self._num_scheduled_tokens += scheduler_output.total_num_scheduled_tokens
        sampled = model_runner_output.sampled_token_ids
        index = {req_id: i for i, req_id in enumerate(model_runner_output.req_ids)}
        errors, drafts = model_runner_output.errors, model_runner_output.num_draft_tokens
        logprobs, prompt_logprobs = (
            model_runner_output.logprobs,
            model_runner_output.prompt_logprobs,
        )
        if self._draft_lengths.most:
            self._learn(step, model_runner_output)
        if self._connector is not None and step.entries:
            self._connector.step_succeeded()
            self._costs.step_ended(
                scheduler_output.total_num_scheduled_tokens,
                len(step.entries),
                step.scheduled_at,
                self._clock(),
            )
        any_finished, charge = False, self._tenants.charge
        for request, start, num_sampled in step.entries:
            if request.status > RequestStatus.PREEMPTED:
                continue  # it ended while the step was in flight
            req_id = request.request_id
            if req_id in errors:
                outputs.append(self._fail(request, errors[req_id], "RequestError"))
                any_finished = True
                continue
            tokens: list[int] = []
            token_logprobs = None
            finished = None
            if num_sampled:
                tokens = sampled[index[req_id]]
                assert 0 < len(tokens) <= num_sampled, f"{req_id} got {len(tokens)} tokens"
                _take_placeholders(request, num_sampled)
                if request.status == RequestStatus.RUNNING:
                    # Places without a right draft come to nothing. (A preempted request starts
                    # over.)
                    request.num_computed_tokens -= num_sampled - len(tokens)
                if drafts and req_id in drafts:
                    self._count_drafts(drafts[req_id], len(tokens) - 1)
                if logprobs:
                    token_logprobs = logprobs.get(req_id)
                finished, count = self._check_stop(request, tokens)
                if count < len(tokens):
                    tokens = tokens[:count]
                    token_logprobs = token_logprobs and token_logprobs.select(0, count)
                request.append_output_token_ids(tokens)
                charge(request.options.share, OUTPUT_WEIGHT * len(tokens))
            new_prompt_logprobs = None
            if prompt_logprobs and req_id in prompt_logprobs:
                new_prompt_logprobs = self._take_prompt_logprobs(
                    request, start, prompt_logprobs[req_id]
                )
            if not tokens and new_prompt_logprobs is None:
                continue
            transfer_params = None
            if finished is not None:
                if self._connector is not None:
                    transfer_params = self._connector.request_finished(request)
                self._finish(request, finished)
                any_finished = True
            outputs.append(
                EngineCoreOutput(
                    request_id=req_id,
                    new_token_ids=tokens,
                    new_logprobs=token_logprobs,
                    new_prompt_logprobs=new_prompt_logprobs,
                    finish_reason=None if finished is None else finished.finish_reason,
                    stop_reason=request.stop_reason,
                    num_cached_tokens=request.num_cached_tokens,
                    first_scheduled_time=request.first_scheduled_time,
                    num_preemptions=request.num_preemptions,
                    kv_transfer_params=transfer_params,
                )
            )
        if any_finished:
            self._drop_finished_from_running()
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """Takes in that the oldest step in flight failed as a whole.

        Its requests fail. What later steps in flight computed may rest on what this one did not:
        their results will be dropped, and the other running requests start over. The prefix cache
        is emptied, for it knows blocks that were never filled.
        """
        outputs, self._outputs = self._outputs, []
        if not scheduler_output.scheduled_reqs:
            return outputs
        step = self._in_flight.popleft()
        assert step.output is scheduler_output, "steps must be updated in order"
        if not step.entries:
            # Dropped when an earlier step failed: nothing scheduled since rests on this one.
            return outputs
        if self._connector is not None:
            self._connector.steps_failed()
        for request, _, _ in step.entries:
            if not request.status.finished:
                outputs.append(self._fail(request, message, "StepFailedError"))
        self._drop_finished_from_running()
        while self.running:
            self._preempt(self.running.pop(), None)
        for later in self._in_flight:
            for request, _, num_sampled in later.entries:
                if num_sampled:
                    _take_placeholders(request, num_sampled)
            later.entries.clear()
        was_reset = self.kv_cache_manager.reset_prefix_cache()
        assert was_reset, "blocks are in use though nothing runs"
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended yet."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether there is anything left to schedule, to tell the worker or to put out.

        Requests that are held are nothing to schedule, before their deadline.
        """
        return bool(
            len(self.requests) > len(self._held)
            or self._finished_req_ids
            or self._outputs
            or (self._held and self._clock() >= self.next_held_deadline)
        )

    @property
    def has_connector(self) -> bool:
        """Whether keys and values are kept elsewhere, too."""
        return self._connector is not None

    @property
    def num_loads(self) -> int:
        """Requests for which a KV connector loads blocks."""
        return self.kv_cache_manager.num_loads

    @property
    def forced_per_request(self) -> int:
        """Most drafts of a request's grammar in a step. They save steps, and with many requests
        they would make these longer: there are none unless all requests could have them."""
        return MAX_FORCED if len(self.running) * MAX_FORCED <= self.max_num_drafts else 0

    @property
    def next_held_deadline(self) -> float:
        """The earliest of the requests that are held; infinite if none of them has one.

        All others are ended by a step.
        """
        return min((r.next_deadline for r in self._held.values()), default=math.inf)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all known prefixes; False while requests hold blocks: nothing is forgotten then.

        Args:
            reset_running_requests: those that run give their blocks back, and start over; no step
                may be in flight.
            reset_connector: what a KV connector keeps is forgotten as well; False if it cannot.
        """
        while reset_running_requests and self.running:
            self._preempt(self.running.pop(), None)
        if not self.kv_cache_manager.reset_prefix_cache():
            return False
        return not reset_connector or self._connector is None or self._connector.reset_cache()

    def take_kv_events(self) -> list[AnyKVEvent]:
        """What has become of known prefixes since the last call, if that is taken down."""
        log = self.kv_cache_manager.pool.events
        return [] if log is None else log.take()

    def make_stats(self) -> SchedulerStats:
        """State and counters."""
        manager = self.kv_cache_manager
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting) + len(self._held),
            kv_cache_usage=manager.usage,
            num_used_blocks=manager.num_used_blocks,
            num_total_blocks=manager.pool.num_usable_blocks,
            prefix_cache_queries=manager.num_queries,
            prefix_cache_hits=manager.num_hits,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens_per_pos=self._num_accepted_tokens_per_pos.copy(),
            num_held_reqs=len(self._held),
            external_prefix_cache_queries=self._num_external_queries,
            external_prefix_cache_hits=self._num_external_hits,
            num_failed_loads=self._num_failed_loads,
            drafting_paused=int(self._draft_lengths.paused),
            num_expired_transfers=0 if self._connector is None else self._connector.num_expired,
        )

    def shutdown(self) -> None:
        """Lets go of what a KV connector has. May be called twice."""
        if self._connector is not None:
            self._connector.shutdown()

    def check_integrity(self) -> None:
        """Checks the books of scheduler and KV cache against one another. O(requests + blocks).

        Raises:
            AssertionError: with what does not add up.
        """
        places = [*self.running, *self.waiting, *self._held.values()]
        if {r.request_id: r for r in places} != self.requests or len(places) != len(self.requests):
            raise AssertionError("a request is lost, or in two places")
        placeholders: dict[Request, int] = dict.fromkeys(places, 0)
        drafts = placeholders.copy()
        for step in self._in_flight:
            for request, _, num_sampled in step.entries:
                if request in placeholders and num_sampled:
                    placeholders[request] += num_sampled
                    drafts[request] += num_sampled - 1
        for i, request in enumerate(places):
            is_running = request.status == RequestStatus.RUNNING
            if is_running != (i < len(self.running)) or request.status.finished:
                raise AssertionError(f"{request.request_id} is {request.status!r}")
            if not is_running and request.num_computed_tokens:
                raise AssertionError(f"{request.request_id} waits with computed tokens")
            if request.num_output_placeholders != placeholders[request]:
                raise AssertionError(f"{request.request_id} misses tokens of steps in flight")
            if request.num_spec_in_flight != drafts[request]:
                raise AssertionError(f"{request.request_id} misses drafts of steps in flight")
            if request.num_computed_tokens > request.num_tokens + placeholders[request]:
                raise AssertionError(f"{request.request_id} is computed beyond its tokens")
        keys = [request.queue_key for request in self.running]
        if keys != sorted(keys) or len(keys) > self.config.max_num_seqs:
            raise AssertionError("too many requests run, or not in order")
        self.kv_cache_manager.check_integrity(self.running)

    def _check_fits(self, request: Request) -> None:
        """Refuses a request that could never be served."""
        prompt = request.num_prompt_tokens
        if prompt == 0:
            raise RequestError("The prompt is empty.", "prompt")
        if prompt >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens and at least one is to be generated, but the "
                f"context holds {self.max_model_len} tokens. Shorten the prompt.",
                "prompt",
            )
        limit = min(request.max_tokens, self.max_model_len - prompt)
        if request.num_output_tokens >= max(limit, 1):
            raise RequestError(
                f"The request has {request.num_output_tokens} output tokens already, and may have "
                f"{limit}: nothing is left to be generated.",
                "max_tokens",
            )
        budget = self.max_num_batched_tokens
        if prompt > budget and not self.config.enable_chunked_prefill:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens, but a step takes {budget} and chunked prefill "
                "is off. Shorten the prompt.",
                "prompt",
            )
        needed = max_blocks_per_request(
            self.kv_cache_config.groups,
            self.kv_cache_config.block_size,
            min(prompt + request.max_tokens, self.max_model_len),
            budget,
        )
        usable = self.kv_cache_manager.pool.num_usable_blocks
        if needed > usable:
            raise ContextLengthError(
                f"The prompt of {prompt} tokens and up to {request.max_tokens} more need {needed} "
                f"KV-cache blocks, but there are {usable}. Shorten the prompt or lower max_tokens.",
                "max_tokens",
            )

    def _check_transfer(self, request: Request) -> None:
        """Refuses what a KV connector cannot do for a request."""
        if self._connector is not None:
            self._connector.check_request(request)
        elif request.options.kv_transfer_params is not None:
            raise RequestError(
                "kv_transfer_params: this server has no KV connector; leave them out, or start it "
                "with --kv-transfer-config.",
                "kv_transfer_params",
            )

    def _find_busy(self) -> frozenset[Request]:
        """The requests that sample in the steps which the stages have not begun or not ended.

        What is not among them is computed while these are, so that no stage waits for another.
        """
        last = list(self._in_flight)[1 - self.num_stages :]
        return frozenset(
            request for step in last for request, _, sampled in step.entries if sampled
        )

    def _schedule_running(self, step: _ScheduledStep, now: float) -> list[Request]:
        """Gives each running request its next tokens, in order of service.

        Returns:
            Where several tenants compete: those with more than one token to compute, which share
            what is left with the waiting ones.
        """
        running = self.running
        share = self._tenants.several_compete and not self._in_order
        self._in_order = False
        prefills: list[Request] = []
        allocate_slots = self.kv_cache_manager.allocate_slots
        may_overtake = self.config.scheduling_policy == "priority"
        # Every stage gets its share of those that decode.
        seats = -(-len(running) // self.num_stages)
        i = 0
        while i < len(running) and step.budget:
            request = running[i]
            if request in step.busy:
                i += 1
                continue
            priority = request.options.priority
            if may_overtake and self.waiting and self.waiting.peek().options.priority < priority:
                # It enters `running` at or before i, so i still is the next one to look at.
                may_overtake = self._admit(step, now, preempt=True)
                i += may_overtake
                continue
            total = len(request.all_token_ids) + request.num_output_placeholders
            left = request.num_prompt_tokens + request.max_tokens - total
            if left <= 0:
                i += 1  # its last token is in flight
                continue
            start, num_drafts = request.num_computed_tokens, 0
            num_new = total - start
            if num_new > 1:
                if share:
                    prefills.append(request)
                    i += 1
                    continue
                num_new = min(self._cap(num_new), step.budget)
            else:
                if not seats:
                    i += 1
                    continue
                seats -= 1
                wanted = step.drafts_per_request
                if request.num_forced:
                    if min(request.num_forced, step.forced_per_request) > wanted:
                        wanted, step.forced = request.num_forced, True
                    request.num_forced = 0
                num_drafts = min(wanted, left - 1, step.budget - 1, step.draft_budget)
            new = allocate_slots(request, num_new + num_drafts) if num_drafts else None
            if new is None:
                num_drafts = 0  # nobody is preempted for drafts
            while new is None and (new := allocate_slots(request, num_new)) is None:
                victim = running.pop()
                self._preempt(victim, request)
                step.preempted = True
                if victim is request:
                    return prefills
            scheduled = ScheduledRequest(
                request.request_id, num_new + num_drafts, new or None, num_drafts
            )
            self._add_to_step(step, request, scheduled, start, total)
            i += 1
        return prefills

    def _share_prefill(self, step: _ScheduledStep, now: float, prefills: list[Request]) -> None:
        """Gives the budget to prompts of several tenants, begun or waiting, by what these got.

        Nobody is preempted for that. If blocks run out for one that is running, the next step goes
        by the order of service alone, so that the first of the running requests is never held up
        for longer than a step by what it could take from others.

        Args:
            step: the step being scheduled.
            now: the time.
            prefills: running requests that are not in the step; some may be preempted by now.
        """
        rank = self.waiting.rank
        prefills = [request for request in prefills if request.status == RequestStatus.RUNNING]
        may_admit = not step.preempted
        while prefills and step.budget:
            request = min(prefills, key=rank)
            if may_admit and self.waiting and rank(self.waiting.peek()) < rank(request):
                may_admit = self._admit(step, now, preempt=False)
                continue
            prefills.remove(request)
            start = request.num_computed_tokens
            total = request.num_tokens + request.num_output_placeholders
            num_new = min(self._cap(total - start), step.budget)
            new = self.kv_cache_manager.allocate_slots(request, num_new)
            if new is None:
                self._in_order = True
                continue
            scheduled = ScheduledRequest(request.request_id, num_new, new or None)
            self._add_to_step(step, request, scheduled, start, total)

    def _admit(self, step: _ScheduledStep, now: float, *, preempt: bool) -> bool:
        """Starts the next waiting request, if there is room for it.

        Args:
            step: the step being scheduled.
            now: the time.
            preempt: make room by preempting running requests of worse priority.
        """
        request = self.waiting.peek()
        if request.num_output_placeholders:
            # Preempted a moment ago; tokens of steps in flight belong to it.
            return self._note_wait(request, WaitReason.IN_FLIGHT)
        manager, options = self.kv_cache_manager, request.options
        if manager.waits_for_leader(request):
            return self._note_wait(request, WaitReason.LEADER)
        whole = not self.config.enable_chunked_prefill
        while True:
            hit, start = manager.get_computed_blocks(request)
            if self._loads_kv and self._begin_load(request, hit):
                return False
            num_new = self._cap(request.num_tokens - start)
            # Only a preempted request can be longer than a whole budget; it is split all the same.
            if whole and step.budget < num_new <= self.max_num_batched_tokens:
                return self._note_wait(request, WaitReason.BUDGET)
            num_new = min(num_new, step.budget)
            seats = self.config.max_num_seqs
            if options.turn > 0:  # the last eighth is for others than calls of many requests
                seats -= seats // 8
            has_seat = len(self.running) < seats
            if has_seat and manager.allocate_slots(request, num_new, hit) is not None:
                break
            worst = self.running[-1] if preempt and self.running else None
            if worst is None or worst.options.priority <= options.priority:
                return self._note_wait(request, WaitReason.BLOCKS if has_seat else WaitReason.SEAT)
            self._preempt(self.running.pop(), request)
            step.preempted = True
        self.waiting.start(request)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_queue_key)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = min(start, request.num_prompt_tokens)
        scheduled = ScheduledRequest(
            request.request_id,
            num_new,
            manager.get_block_ids(request),
            new=NewRequestData(
                request.all_token_ids.copy(),
                request.num_prompt_tokens,
                request.sampling_params,
                start,
                private=request.options.cache_salt is not None,
                prompt_embeds=request.prompt_embeds,
            ),
        )
        if self._connector is not None:
            if self._loads_kv and request.num_external_tokens is None:
                self._num_external_queries += request.num_tokens - start
            assert scheduled.new_block_ids is not None
            self._connector.update_state_after_alloc(request, scheduled.new_block_ids, 0)
        self._add_to_step(step, request, scheduled, start, request.num_tokens)
        return True

    def _begin_load(self, request: Request, hit: KVCacheBlocks) -> bool:
        """Has a KV connector load what it knows of a request that is about to be started.

        The request is held meanwhile, and comes back to its place in the queue when the blocks are
        known prefixes, or turn out not to be right. That is done once, and again after a
        preemption.

        Args:
            request: the first of those that wait.
            hit: what the prefix cache has of it.

        Returns:
            Whether it is held.
        """
        size, connector = self.kv_cache_config.block_size, self._connector
        assert connector is not None
        if (
            request.num_external_tokens is not None
            or request.skip_reading_prefix_cache
            or hit.num_tokens % size
        ):
            return False
        # Others wait for the same blocks: they are loaded once.
        wanted = request.block_hashes[hit.num_tokens // size :][:1]
        for owner in self._loading:
            if self.kv_cache_manager.is_loading(owner, wanted):
                self._hold_for_load(request, owner)
                return True
        if len(self.running) + len(self._loading) >= self.config.max_num_seqs:
            return False
        if request.request_id in self._loading:  # of a request that ended with this very id
            return False
        count, beside = connector.get_num_new_matched_tokens(request, hit.num_tokens)
        if not count:
            return False
        block_ids = self.kv_cache_manager.start_load(request, hit, count)
        if block_ids is None:
            return False  # it would not be started either
        request.num_external_tokens = count
        self._num_external_queries += request.num_tokens - hit.num_tokens
        self._num_external_hits += count
        self._loaded_block_ids += [i for ids in block_ids for i in ids[hit.num_tokens // size :]]
        connector.update_state_after_alloc(request, block_ids, count)
        self._loading[request.request_id] = []
        if not beside:
            self._loads_before.append(request.request_id)
        self._costs.load_began(request.request_id, count, self._clock())
        self._hold_for_load(request, request.request_id)
        return True

    def _hold_for_load(self, request: Request, owner: str) -> None:
        self._note_wait(request, WaitReason.REMOTE_KVS)
        self._loading[owner].append(request)
        self.hold(request.request_id, RequestStatus.WAITING_FOR_REMOTE_KVS)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Takes in what all workers' halves of the KV connector have finished."""
        assert self._connector is not None
        policy = self._connector.transfer_config.kv_load_failure_policy
        for req_id in output.finished_recving:
            good = self.kv_cache_manager.finish_load(req_id, output.invalid_block_ids)
            self._costs.load_ended(req_id, self._clock())
            self._num_failed_loads += not good
            owner, *others = self._loading.pop(req_id)
            for request in (owner, *others):
                if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                    continue  # it has ended meanwhile
                if good or policy == "recompute" or request is not owner:
                    self.set_ready(request.request_id)
                else:
                    self.fail_request(
                        req_id,
                        "The KV cache of its prompt could not be loaded; try again, or set "
                        "kv_load_failure_policy=recompute in kv_transfer_config.",
                        "KVLoadError",
                    )
        self._connector.update_connector_output(output)

    @property
    def _swaps(self) -> bool:
        """Whether blocks that a preempted request gives up are loaded again, not computed."""
        mode = self.config.preemption_mode
        return mode == "swap" or (mode == "auto" and not self._costs.computing_is_cheaper)

    def _cap(self, num_new: int) -> int:
        """Limits the prompt tokens of one request in a step, if the settings do."""
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new and self.config.enable_chunked_prefill:
            return threshold
        return num_new

    def _add_to_step(
        self,
        step: _ScheduledStep,
        request: Request,
        scheduled: ScheduledRequest,
        start: int,
        total: int,
    ) -> None:
        """Books a request's part from `start`; `total` tokens are known or in flight."""
        request.num_computed_tokens = end = start + scheduled.num_tokens
        num_sampled = 0
        if request.num_charged < request.num_prompt_tokens:
            # What was cached costs nothing, what is computed again was charged before.
            first, end = max(start, request.num_charged), min(end, request.num_prompt_tokens)
            if first < end:
                self._tenants.charge(request.options.share, PROMPT_WEIGHT * (end - first))
                request.num_charged = end
        if request.num_computed_tokens >= total:
            if request.competes:
                request.competes = False
                self._tenants.cease(request.options.share)
            num_sampled = scheduled.num_drafts + 1
            request.num_output_placeholders += num_sampled
            request.num_spec_in_flight += scheduled.num_drafts
            scheduled.has_grammar = request.sampling_params.grammar is not None
        step.output.scheduled_reqs.append(scheduled)
        step.entries.append((request, start, num_sampled))
        step.budget -= scheduled.num_tokens
        step.draft_budget -= scheduled.num_drafts

    def _note_wait(self, request: Request, reason: WaitReason) -> bool:
        """Tells the observer why a request is not started; False, for `_admit` to return."""
        if self._observer is not None:
            self._observer.on_wait(request, reason)
        return False

    def _preempt(self, request: Request, by: Request | None) -> None:
        """Puts a request, just taken out of `running`, back to the waiting ones.

        Tokens that steps in flight sample for it stay valid: they depend on its own tokens only.
        """
        if self._observer is not None:
            self._observer.on_preempt(request, by)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_forced = 0
        request.num_external_tokens = None if self._swaps else 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._finished_req_ids.append(request.request_id)
        self.waiting.push(request)

    def _choose_num_drafts(self, now: float) -> int:
        """Return the most drafts of a request in the next step, and log when drafting stops or
        goes on, as often as is readable."""
        lengths, num_reqs = self._draft_lengths, len(self.running)
        num_drafts = lengths.choose(num_reqs)
        if lengths.paused != self._logged_pause and now >= self._next_drafting_line:
            self._logged_pause, self._next_drafting_line = lengths.paused, now + _DRAFTING_INTERVAL
            change = "paused: does not pay" if lengths.paused else "resumed: pays"
            logger.info("drafting %s at this load (%d running)", change, num_reqs)
        return num_drafts

    def _learn(self, step: _ScheduledStep, output: ModelRunnerOutput) -> None:
        """Takes note of what a step's drafts cost and brought."""
        now = self._clock()
        # It began when it was scheduled, or when the step before it ended.
        seconds, self._last_update = now - max(step.scheduled_at, self._last_update), now
        work = step.output.scheduled_reqs
        if not (output.errors or step.forced) and all(
            r.num_tokens == 1 + r.num_drafts for r in work
        ):
            self._draft_lengths.record(
                seconds,
                [output.num_draft_tokens.get(req_id, 0) for req_id in output.req_ids],
                [max(0, len(tokens) - 1) for tokens in output.sampled_token_ids],
            )

    def _count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        accepted = self._num_accepted_tokens_per_pos
        accepted += [0] * (num_accepted - len(accepted))
        for place in range(num_accepted):
            accepted[place] += 1

    def _check_stop(self, request: Request, tokens: list[int]) -> tuple[RequestStatus | None, int]:
        """Whether new tokens end the request, and how many of them belong to its output."""
        num_output = request.num_output_tokens
        for count, token in enumerate(tokens, 1):
            if token in request.stop_token_ids:
                params = request.sampling_params
                if num_output + count > params.min_tokens:
                    if token in params.stop_token_ids:
                        request.stop_reason = token
                    return RequestStatus.FINISHED_STOPPED, count
            if num_output + count >= request.max_tokens:
                return RequestStatus.FINISHED_LENGTH_CAPPED, count
        return None, len(tokens)

    def _take_prompt_logprobs(
        self, request: Request, start: int, rows: LogprobsLists
    ) -> LogprobsLists | None:
        """The prompt logprobs that are new.

        The step's first row is for position `start` + 1; a request that was preempted computes
        again what it has handed out.
        """
        known = max(0, request.num_prompt_logprobs - start)
        if known >= rows.num_rows:
            return None
        request.num_prompt_logprobs = start + rows.num_rows
        return rows.select(known, rows.num_rows)

    def _fail_expired(self, now: float) -> None:
        """Ends the requests whose deadline has passed; a scan only when one may have."""
        for request in [r for r in self.requests.values() if r.next_deadline <= now]:
            if request.options.deadline is None or request.options.deadline > now:
                message, kind = "The first token did not come in time.", "FirstTokenError"
            else:
                message = f"The deadline passed after {request.num_output_tokens} output tokens."
                kind = "DeadlineError"
            self._outputs.append(self._fail(request, message, kind))
        self._drop_finished_from_running()
        self._next_deadline = min(
            (r.next_deadline for r in self.requests.values()), default=math.inf
        )

    def _fail(self, request: Request, message: str, error_kind: str) -> EngineCoreOutput:
        """Ends a request with an error; returns the output that says so."""
        request.error, request.error_kind = message, error_kind
        self._finish(request, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.status.finish_reason,
            error=message,
            error_kind=error_kind,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Ends a request; the caller drops it from `running`."""
        req_id = request.request_id
        del self.requests[req_id]
        if request.competes:
            request.competes = False
            self._tenants.cease(request.options.share)
        self._tenants.leave(request.options.share)
        if request.status == RequestStatus.RUNNING:
            self.kv_cache_manager.free(request)
            self._finished_req_ids.append(req_id)
        elif request.status in _HELD:
            del self._held[req_id]
        else:
            self.waiting.remove(request)
        request.status = status

    def _drop_finished_from_running(self) -> None:
        running = RequestStatus.RUNNING
        self.running = [request for request in self.running if request.status is running]


def _take_placeholders(request: Request, num_sampled: int) -> None:
    """What a step in flight was to sample has come, or never will."""
    request.num_output_placeholders -= num_sampled
    request.num_spec_in_flight -= num_sampled - 1


def _queue_key(request: Request) -> QueueKey:
    return request.queue_key
