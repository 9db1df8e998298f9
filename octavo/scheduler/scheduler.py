"""The scheduler: the content of each step, and the effects of its result.

There is no prefill phase and no decode phase. Each request's `num_computed_tokens` catches up with
its tokens (drafts to verify included) within one token budget per step. That alone gives continuous
batching, chunked prefill, prefix hits, speculation and recovery after preemption.

The scheduler may schedule a step before it knows the results of earlier steps (async scheduling).
The tokens that earlier steps will sample are placeholders: they have positions and slots, but no
ids here. The worker executes steps in order, so it knows the ids in time. It also holds the drafts;
the scheduler only reserves places for them. The numbers of proposed and accepted drafts are unknown
during the step. So the scheduler assumes one token for each place, which reserves enough slots in
any case. The worker computes from the true position, and the result corrects the counts.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from octavo.config import LoRAConfig, SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.groups import KVCacheConfig
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.messages import (
    AdapterLoaded,
    EngineCoreOutput,
    FinishReason,
    KVConnectorOutput,
    Modality,
    ModelRunnerOutput,
    NewRequestData,
    PauseMode,
    ScheduledRequest,
    SchedulerOutput,
)
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.request import QueueKey, Request, RequestStatus
from octavo.scheduler.adapters import AdapterSlots, AdapterTurns
from octavo.scheduler.checks import check_books, check_fits
from octavo.scheduler.deadlines import Deadlines, describe_expiry
from octavo.scheduler.encoders import EncoderInputs
from octavo.scheduler.fairness import (
    CREDIT_STEPS,
    ENCODER_WEIGHT,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    TenantCounters,
)
from octavo.scheduler.held import HELD, HeldRequests
from octavo.scheduler.kv_loads import KVLoads
from octavo.scheduler.listener import StepListener, WaitReason
from octavo.scheduler.queue import BACKGROUND, Arrivals, WaitingQueue
from octavo.scheduler.results import check_stop, take_prompt_logprobs
from octavo.scheduler.speculation import Drafting
from octavo.scheduler.step import ScheduledStep
from octavo.system.clock import now

# Tokens for which a step reads the weights about as long as for one.
BACKGROUND_TOKENS = 16
"""Tokens of all requests in the background in a step with others, on average."""


class Scheduler:
    """Choice of the requests that run, and their records from arrival to end.

    The running requests are sorted and scheduled in the order of service. The last one is preempted
    if blocks run out. Thus a preempted request is not in the same step yet, and the first request
    always makes progress.

    For each `schedule()` the caller must call `update_from_output` (or `fail_step`), in the same
    order, with an empty `ModelRunnerOutput` if the step had nothing to compute.

    Args:
        config: the scheduler's settings.
        kv_cache_config: shape of the KV cache.
        max_model_len: most tokens of a request, prompt and output.
        max_num_batched_tokens: token budget of a step.
        enable_caching: True to keep KV blocks of known prefixes after their last use.
        num_speculative_tokens: most drafts of a request in a step, not counting those of grammars.
        max_num_drafts: most drafts of all requests in a step.
        num_stages: steps that are computed at the same time (pipeline parallelism).
        clock: returns the time in seconds, as in requests' `deadline`.
        listeners: notified when requests wait or are preempted.
        kv_events: log of changes of the prefix cache.
        connector: the scheduler's half of a KV connector.
        message_ends: ids of the tokens that end messages; see `StateManager`.
        lora: settings of adapters; None: they are off.
        encoder_cache_size: number of rows that the encoder cache holds; 0: the model has no
            encoder. A step computes items of at most `max_num_batched_tokens` encoder tokens, or
            one larger item.
        encoder_pieces: see `EncoderInputs`.
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
        listeners: Sequence[StepListener] = (),
        kv_events: KVEventLog | None = None,
        connector: KVConnectorScheduler | None = None,
        message_ends: Iterable[int] = (),
        lora: LoRAConfig | None = None,
        encoder_cache_size: int = 0,
        encoder_pieces: Mapping[Modality, Callable[[int, int], int]] | None = None,
    ) -> None:
        self.config = config
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_stages = num_stages
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config, enable_caching, kv_events, message_ends
        )

        self.requests: dict[str, Request] = {}
        """All unfinished requests."""
        self.running: list[Request] = []
        """Requests with a row in the worker, in order of service."""
        self.paused = False
        """True if new requests are held until `resume`."""
        self.drafting = Drafting(num_speculative_tokens, max_num_drafts)
        self._tenants = TenantCounters(CREDIT_STEPS * max_num_batched_tokens)
        self._in_order = False
        """True if the next step respects only the order of service; see `_share_prefill`."""
        self._arrivals = Arrivals(config.scheduling_policy)
        self.waiting = WaitingQueue(self._tenants)
        self._held = HeldRequests()
        self.adapters: AdapterSlots | None = None
        """Adapters in memory; None: adapters are off."""
        if lora is not None:
            self.adapters = AdapterSlots(lora.num_in_memory)
        self._turns = AdapterTurns(0 if lora is None else lora.max_loras)
        self._num_saved = 0
        """Tokens of the background that it did not use in the last step with others."""
        self._encoders = EncoderInputs(
            encoder_cache_size, max_num_batched_tokens, config.max_num_seqs, encoder_pieces
        )
        self._awaiting_encoder: set[Request] = set()
        """Requests held until the next step, because of their items; some may have ended."""
        self._range_waits = False
        """True if tokens that see each other found no room in the last step: the next one has no
        drafts."""
        self._deadlines = Deadlines()
        self._in_flight: deque[ScheduledStep] = deque()
        self._finished_req_ids: list[str] = []
        """Rows that the worker must free before the next step."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that no step made."""
        self._clock, self._listeners = clock, listeners
        self._connector = connector
        self._loads: KVLoads | None = None
        if connector is not None:
            self._loads = KVLoads(connector, config, self.kv_cache_manager)
        self._num_preemptions = 0
        self._expert_counts = 0, 0, 0, 0, 0
        self._last_result = -math.inf
        """Time when the last step ended."""
        self._num_steps = 0
        self._num_scheduled_tokens = 0

    def add_request(self, request: Request) -> None:
        """Accept a request; hold it until `set_ready` if its status is a wait.

        Raises:
            ContextLengthError: the request can never run; see `check_fits`.
            RequestError: its id is in use, its prompt is empty, its output is complete, the KV
                connector rejects its parameters, or it has an adapter and adapters are off.
        """
        if request.request_id in self.requests:
            raise RequestError(f"Request id {request.request_id!r} is in use.", "request_id")
        check_fits(
            request,
            self.config,
            self.kv_cache_config,
            max_model_len=self.max_model_len,
            budget=self.max_num_batched_tokens,
            num_usable_blocks=self.kv_cache_manager.pool.num_usable_blocks,
        )
        self._check_transfer(request)
        self._check_adapter(request)
        if request.mm_end:
            self._encoders.check(request)
        # The context also limits the output. Later code needs only `max_tokens`.
        left = self.max_model_len - request.num_prompt_tokens
        if request.pooling is not None:
            left = 1  # its result takes the place of one token, and no room in the context
        request.max_tokens = min(request.max_tokens, left)
        request.queue_key = self._arrivals.next_key(request)
        self.requests[request.request_id] = request
        self._deadlines.add(request)
        self._tenants.arrive(request.options.share)
        request.competes = True
        if self.adapters is not None:
            self.adapters.add(request)
        if request.status == RequestStatus.WAITING:
            request.status = self._find_wait(request) or request.status
        if request.status in HELD:
            self._hold(request, request.status)
        else:
            self.waiting.push(request)

    def pause(self, mode: PauseMode) -> None:
        """Hold all requests that arrive until `resume`.

        Args:
            mode: effect on unfinished requests. abort: end them with a last output. keep: hold
                them, too, and continue them later from their tokens; no step may be in flight.
                wait: let them continue.
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
            self._preempt_all()
            for request in list(self.waiting):
                self.hold(request.request_id, RequestStatus.WAITING_FOR_WAKE_UP)

    def resume(self) -> None:
        """End the effects of `pause`."""
        self.paused = False
        for request in list(self._held.values()):
            if request.status == RequestStatus.WAITING_FOR_WAKE_UP:
                self.set_ready(request.request_id)

    def hold(self, request_id: str, status: RequestStatus) -> None:
        """Remove a waiting request from the queue until `set_ready`.

        Args:
            request_id: a request that waits.
            status: the reason, one of `HELD`.
        """
        request = self.requests[request_id]
        self.waiting.remove(request)
        self._hold(request, status)

    def _hold(self, request: Request, status: RequestStatus) -> None:
        self._held.add(request, status)
        for listener in self._listeners:
            listener.on_hold(request)

    def set_ready(self, request_id: str) -> None:
        """Move a held request to its place in the queue; ignore a finished one.

        While the scheduler is paused, the request is held until the pause ends; then, until its
        adapter is in memory.
        """
        request = self._held.get(request_id)
        if request is None:
            return
        if (status := self._find_wait(request)) is not None:
            self._hold(request, status)
            return
        self.waiting.push(self._held.release(request_id))
        for listener in self._listeners:
            listener.on_ready(request)

    def _find_wait(self, request: Request) -> RequestStatus | None:
        """Return the status of a request that cannot be queued yet; None: it can."""
        if self.paused:
            return RequestStatus.WAITING_FOR_WAKE_UP
        if self.adapters is not None and not self.adapters.is_ready(request):
            return RequestStatus.WAITING_FOR_ADAPTER
        return None

    def update_adapter(self, loaded: AdapterLoaded) -> None:
        """Queue the requests whose adapter all workers have read, or fail them."""
        assert self.adapters is not None
        for request_id in self.adapters.finish(loaded):
            if loaded.error is not None:
                self.fail_request(request_id, loaded.error, loaded.error_kind)
            elif self.requests[request_id].status == RequestStatus.WAITING_FOR_ADAPTER:
                self.set_ready(request_id)

    def fail_request(self, request_id: str, message: str, error_kind: str = "RequestError") -> None:
        """End a request in any state; the next outputs contain the error.

        Args:
            request_id: the request; ignored if it has finished.
            message: the cause.
            error_kind: name of the error class in `octavo.errors`.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._outputs.append(self._fail(request, message, error_kind))
            self._drop_finished_from_running()

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests in any state, without outputs; ignore ids of finished ones.

        The results of steps in flight are dropped for these requests.
        """
        assert status.finished, status
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
        self._drop_finished_from_running()

    def schedule(self) -> SchedulerOutput:
        """Return the next step; it may be empty."""
        now = self._clock()
        if now >= self._deadlines.next:
            self._fail_expired(now)
        self._encoders.begin_step(self.running)
        if self._awaiting_encoder:
            self._end_waits_for_encoders()
        output = SchedulerOutput()
        step = ScheduledStep(
            output,
            self.max_num_batched_tokens,
            0 if self._range_waits else self.drafting.max_num_drafts,
            self.drafting.choose(len(self.running), now),
            self.forced_per_request,
            now,
        )
        self._range_waits = False
        if self.num_stages > 1:
            step.busy = self._find_busy()
        prefills = self._schedule_running(step, now)
        if prefills:
            self._share_prefill(step, now, prefills)
        if not step.preempted:
            while self.waiting and step.budget:
                request = self.waiting.peek()
                if not (self._admit(step, now, preempt=False) or request.status in HELD):
                    break
            if self.waiting and not step.budget:
                self._note_wait(self.waiting.peek(), WaitReason.BUDGET)
        if step.busy and not step.entries:  # better than an empty step
            step.busy = frozenset()
            self._schedule_running(step, now)
        output.total_num_scheduled_tokens = (
            self.max_num_batched_tokens - step.budget - step.num_left_out
        )
        output.blocks_to_copy = self.kv_cache_manager.take_blocks_to_copy()
        step.item_work = self._encoders.end_step(output)
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        if self.adapters is not None:
            output.adapter_changes = self.adapters.take_changes()
        if self._loads is not None:
            self._loads.complete_step(output)
        if step.entries:
            self._in_flight.append(step)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Apply the result of the oldest step in flight.

        A request in `errors` failed alone, after the forward pass: the KV of all tokens of the
        step is in the cache, and other requests rely on it. If the encoder of an item failed, this
        KV is NaN, so all requests that rely on it fail, too; then it is forgotten.

        Returns:
            The new outputs, in batch order.
        """
        outputs, step = self._end_step(scheduler_output)
        if step is None:
            return outputs
        result, num_requests = model_runner_output, len(self.requests)
        self._expert_counts = max(self._expert_counts, result.expert_counts)
        if result.forget_prefixes:
            self.kv_cache_manager.forget_prefixes()
        self._note_success(step, result)
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for request, start, num_sampled in step.entries:
            has_ended = request.status > RequestStatus.PREEMPTED  # while the step was in flight
            error = result.errors.get(request.request_id) if result.errors else None
            if error is not None:
                if not has_ended:
                    outputs.append(self._fail(request, error, "RequestError"))
                if _has_come_to_items(request):
                    self.kv_cache_manager.forget_items(request)
                    self._encoders.cache.forget(request)
                    if self._connector is not None:
                        self._connector.forget_items(request)
                continue
            if has_ended:
                continue
            output = self._take_result(request, start, num_sampled, sampled, result)
            if output is not None:
                outputs.append(output)
            elif request.options.reports_progress and _is_first_prefill(request):
                outputs.append(_progress(step, request, start))
        if len(self.requests) < num_requests:
            self._drop_finished_from_running()
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """Fail the oldest step in flight, and its requests.

        Later steps in flight may rely on tokens that this one did not compute: their results will
        be dropped, and the other running requests start again. The prefix cache forgets all
        blocks, since some were never filled.
        """
        return self._drop_step(scheduler_output, message)

    def repeat_step(self, scheduler_output: SchedulerOutput) -> list[EngineCoreOutput]:
        """Drop the oldest step in flight; compute its requests again from their tokens.

        The others are treated as by `fail_step`.
        """
        return self._drop_step(scheduler_output, None)

    def _drop_step(
        self, scheduler_output: SchedulerOutput, message: str | None
    ) -> list[EngineCoreOutput]:
        """Drop the oldest step in flight; with a message, fail its requests."""
        outputs, step = self._end_step(scheduler_output)
        if step is None or not step.entries:
            # Dropped when an earlier step failed: nothing scheduled since relies on this one.
            return outputs
        if self._connector is not None:
            self._connector.steps_failed()
        if message is None:
            step.drop()
        else:
            failing = [request for request, _, _ in step.entries if not request.status.finished]
            outputs += [self._fail(r, message, "StepFailedError") for r in failing]
        self._drop_finished_from_running()
        self._preempt_all()
        for later in self._in_flight:
            later.drop()
        was_reset = self.reset_encoder_cache()
        assert was_reset, "rows are in use though nothing runs"
        was_reset = self.kv_cache_manager.reset_prefix_cache()
        assert was_reset, "blocks are in use though nothing runs"
        return outputs

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Apply the transfers that all workers' halves of the KV connector have finished."""
        assert self._loads is not None
        for request, may_start in self._loads.finish(output, self._clock()):
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue  # it ended before its load
            if may_start:
                self.set_ready(request.request_id)
            else:
                self.fail_request(
                    request.request_id,
                    "The KV cache of its prompt could not be loaded; try again, or set "
                    "kv_load_failure_policy=recompute in kv_transfer_config.",
                    "KVLoadError",
                )

    def has_unfinished_requests(self) -> bool:
        """Return True if a request has not ended yet."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Return True if there is anything to schedule, to send to the worker or to return.

        A held request does not count before its deadline.
        """
        return bool(
            len(self.requests) > len(self._held)
            or self._finished_req_ids
            or self._outputs
            or self._awaiting_encoder
            or (self.adapters is not None and self.adapters.has_changes)
            or (self._held and self._clock() >= self.next_held_deadline)
        )

    @property
    def only_awaits_results(self) -> bool:
        """True if a step scheduled now would be empty, since steps in flight compute all requests.

        That is so if every request returns vectors or scores, and none waits.
        """
        return (
            len(self.running) == len(self.requests)
            and not (self._finished_req_ids or self._outputs)
            and all(
                r.pooling is not None and r.num_computed_tokens >= r.num_tokens
                for r in self.running
            )
        )

    @property
    def has_connector(self) -> bool:
        """True if the scheduler has a KV connector."""
        return self._connector is not None

    @property
    def num_loads(self) -> int:
        """Number of requests with blocks being loaded."""
        return self.kv_cache_manager.num_loads

    @property
    def num_loading_adapters(self) -> int:
        """Number of adapters that the workers read."""
        return 0 if self.adapters is None else self.adapters.num_loading

    @property
    def forced_per_request(self) -> int:
        """Most drafts of a request's grammar in a step."""
        return self.drafting.forced_per_request(len(self.running))

    @property
    def next_held_deadline(self) -> float:
        """The earliest deadline of a held request; infinite without deadlines."""
        return self._held.next_deadline

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all known prefixes.

        Args:
            reset_running_requests: True to free the blocks of running requests, which start again;
                no step may be in flight.
            reset_connector: True to reset the KV connector's cache, too.

        Returns:
            False if all prefixes stay known because a request has blocks, or if the connector
            cannot be reset.
        """
        if reset_running_requests:
            self._preempt_all()
        if not self.kv_cache_manager.reset_prefix_cache():
            return False
        self.reset_encoder_cache()
        return not reset_connector or self._connector is None or self._connector.reset_cache()

    def reset_encoder_cache(self) -> bool:
        """Forget the results of encoders; return False, and keep them, if requests use some.

        A run in progress begins again.
        """
        self._encoders.forget_run()
        return self._encoders.cache.forget_all()

    def make_stats(self) -> SchedulerStats:
        """Return state and counters."""
        manager, drafting, loads = self.kv_cache_manager, self.drafting, self._loads
        states = manager.states
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
            num_drafts=drafting.num_drafts,
            num_draft_tokens=drafting.num_draft_tokens,
            num_accepted_tokens_per_pos=drafting.num_accepted_tokens_per_pos.copy(),
            num_held_reqs=len(self._held),
            external_prefix_cache_queries=0 if loads is None else loads.num_queries,
            external_prefix_cache_hits=0 if loads is None else loads.num_hits,
            num_failed_loads=0 if loads is None else loads.num_failed,
            num_snapshots=0 if states is None else len(states.known),
            num_snapshot_evictions=0 if states is None else states.num_evictions,
            drafting_paused=int(drafting.lengths.paused),
            expert_cache_hits=self._expert_counts[0],
            expert_cache_misses=self._expert_counts[1],
            expert_cache_bytes_read=self._expert_counts[2],
            expert_cache_fetched_ahead=self._expert_counts[3],
            expert_cache_fetched_ahead_used=self._expert_counts[4],
            num_encoder_cache_rows=self._encoders.cache.num_rows,
            num_used_encoder_cache_rows=self._encoders.cache.num_used_rows,
            mm_cache_queries=self._encoders.cache.num_queries,
            mm_cache_hits=self._encoders.cache.num_hits,
            num_expired_transfers=0 if self._connector is None else self._connector.num_expired,
        )

    def shutdown(self) -> None:
        """Free the KV connector's resources. A second call is harmless."""
        if self._connector is not None:
            self._connector.shutdown()

    def check_integrity(self) -> None:
        """Check that the state of scheduler and KV cache is consistent. O(requests + blocks).

        Raises:
            AssertionError: the state is inconsistent; the message names the error.
        """
        others = [*self.waiting, *self._held.values()]
        most = self.config.max_num_seqs
        check_books(self.requests, self.running, others, self._in_flight, most)
        self.kv_cache_manager.check_integrity(self.running)
        self._encoders.cache.check_integrity(self.running)
        if self.adapters is not None:
            self.adapters.check_integrity(self.requests.values())

    def _check_transfer(self, request: Request) -> None:
        """Raise `RequestError` if the KV connector rejects a request's parameters."""
        if self._connector is not None:
            self._connector.check_request(request)
        elif request.options.kv_transfer_params is not None:
            raise RequestError(
                "kv_transfer_params: this server has no KV connector; leave them out, or start it "
                "with --kv-transfer-config.",
                "kv_transfer_params",
            )

    def _check_adapter(self, request: Request) -> None:
        """Raise `RequestError` if a request has an adapter, and adapters are off."""
        if request.options.adapter is not None and self.adapters is None:
            raise RequestError(
                f"The adapter {request.options.adapter.name!r} cannot be used: adapters are off; "
                "start the engine with enable_lora (--enable-lora).",
                "lora_request",
            )

    def _find_busy(self) -> frozenset[Request]:
        """Return the requests that sample in the steps that the stages have not finished.

        The others are computed at the same time, so that no stage waits for another.
        """
        last = list(self._in_flight)[1 - self.num_stages :]
        return frozenset(
            request for step in last for request, _, sampled in step.entries if sampled
        )

    def _schedule_running(self, step: ScheduledStep, now: float) -> list[Request]:
        """Schedule the next tokens of each running request, in order of service.

        Returns:
            If several tenants compete, the requests with more than one token to compute: they
            share the rest of the budget with the waiting ones.
        """
        running = self.running
        share = self._tenants.several_compete and not self._in_order
        self._in_order = False
        prefills: list[Request] = []
        allocate_slots, encoders = self.kv_cache_manager.allocate_slots, self._encoders
        may_overtake = bool(self.waiting and running) and (
            self.waiting.peek().queue_key[0] < running[-1].queue_key[0]
        )
        # Divide the decoding requests among the stages.
        seats = -(-len(running) // self.num_stages)
        i = 0
        while i < len(running) and step.budget:
            request = running[i]
            if request in step.busy:
                i += 1
                continue
            priority = request.queue_key[0]
            if may_overtake and self.waiting and self.waiting.peek().queue_key[0] < priority:
                # It enters `running` at or before i, so i is still the index of the next one.
                may_overtake = self._admit(step, now, preempt=True)
                i += may_overtake
                continue
            if priority == BACKGROUND and not self._leave_budget(step):
                break
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
            if start < request.mm_end:
                num_new = self._fit_ranges(step, request, start, num_new, step.budget)
                if not num_new and priority == BACKGROUND:
                    self._save_budget(step)
                num_new = encoders.fit(request, start, num_new)
                if not num_new:
                    i += 1
                    continue
            new = allocate_slots(request, num_new + num_drafts) if num_drafts else None
            if new is None:
                num_drafts = 0  # no request is preempted for drafts
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

    def _share_prefill(self, step: ScheduledStep, now: float, prefills: list[Request]) -> None:
        """Share the budget among prompts of several tenants, running or waiting, by their counters.

        This preempts no request. If a running request finds no free blocks, the next step respects
        only the order of service. So the first running request waits at most one step for blocks
        that preempting other requests would free.

        Args:
            step: the step being scheduled.
            now: the time.
            prefills: running requests that are not in the step; some may have been preempted.
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
            if request.options.background and not self._leave_budget(step):
                break
            start = request.num_computed_tokens
            total = request.num_tokens + request.num_output_placeholders
            num_new = min(self._cap(total - start), step.budget)
            if start < request.mm_end:
                num_new = self._fit_ranges(step, request, start, num_new, step.budget)
                if not num_new and request.options.background:
                    self._save_budget(step)
                num_new = self._encoders.fit(request, start, num_new)
                if not num_new:
                    continue
            new = self.kv_cache_manager.allocate_slots(request, num_new)
            if new is None:
                self._in_order = True
                continue
            scheduled = ScheduledRequest(request.request_id, num_new, new or None)
            self._add_to_step(step, request, scheduled, start, total)

    def _admit(self, step: ScheduledStep, now: float, *, preempt: bool) -> bool:
        """Start the next waiting request if there is room for it; return True if it started.

        Args:
            step: the step being scheduled.
            now: the time.
            preempt: True to make room by preempting running requests of worse priority.
        """
        request = self.waiting.peek()
        if request.num_output_placeholders:
            # The request was preempted, and steps in flight sample tokens for it.
            return self._note_wait(request, WaitReason.IN_FLIGHT)
        if request.options.background and not self._leave_budget(step):
            return self._note_wait(request, WaitReason.BUDGET)
        manager, options = self.kv_cache_manager, request.options
        if manager.waits_for_leader(request):
            return self._note_wait(request, WaitReason.LEADER)
        if not self._turns.may_start(request, self.running):
            self.hold(request.request_id, RequestStatus.WAITING_FOR_ADAPTER_TURN)
            return False
        whole = request.whole or not self.config.enable_chunked_prefill
        num_encoded = 0 if manager.cross is None else manager.cross.num_encoder_tokens(request)
        while True:
            hit, start = manager.get_computed_blocks(request)
            if self._loads is not None and self._loads.must_wait(
                request, hit, len(self.running), now
            ):
                self.hold(request.request_id, RequestStatus.WAITING_FOR_REMOTE_KVS)
                return self._note_wait(request, WaitReason.REMOTE_KVS)
            room = self._room_beside_encoder(step, request, num_encoded)
            if room <= 0:
                return self._wait_for_budget(step, request)
            num_new = request.num_tokens - start
            if not whole:
                num_new = self._cap(num_new)
            # Only a preempted request can be longer than a whole budget; it is split anyway.
            whole &= num_new <= self.max_num_batched_tokens - num_encoded
            if whole and num_new > room:
                return self._wait_for_budget(step, request)
            num_new = min(num_new, room)
            if request.mm_end:
                num_new = self._fit_ranges(step, request, start, num_new, room)
                if not num_new:
                    return self._wait_for_budget(step, request)
            if request.mm_end and not (
                num_new := self._encoders.fit(request, start, num_new, whole=whole)
            ):
                self.hold(request.request_id, RequestStatus.WAITING_FOR_ENCODER)
                self._awaiting_encoder.add(request)
                return self._note_wait(request, WaitReason.ENCODER)
            seats = self.config.max_num_seqs
            if options.turn > 0:  # the last eighth is for the first requests of calls
                seats -= seats // 8
            has_seat = len(self.running) < seats
            if has_seat and manager.allocate_slots(request, num_new, hit) is not None:
                break
            worst = self.running[-1] if preempt and self.running else None
            if worst is None or worst.queue_key[0] <= request.queue_key[0]:
                self._note_wait(request, WaitReason.BLOCKS if has_seat else WaitReason.SEAT)
                if has_seat:
                    for listener in self._listeners:
                        listener.on_blocks_missing(manager.num_held_blocks)
                return False
            self._preempt(self.running.pop(), request)
            step.preempted = True
        self.waiting.start(request)
        self._turns.note_start(request)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_queue_key)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = min(start, request.num_prompt_tokens)
            request.num_stored_tokens = hit.num_stored
            if (given_up := manager.given_up_after(request, start)) is not None:
                for listener in self._listeners:
                    listener.on_given_up(request, given_up)
        data = NewRequestData(
            request.all_token_ids.copy(),
            request.num_prompt_tokens,
            request.sampling_params,
            start,
            private=request.options.cache_salt is not None,
            prompt_embeds=request.prompt_embeds,
            pooling=request.pooling,
            adapter_slot=-1 if self.adapters is None else self.adapters.slot_of(request),
            adapter_begin=request.options.adapter_begin,
        )
        if request.mm_features:
            data.mm_features = self._encoders.data_for_worker(request, start)
        if manager.cross is not None:
            if manager.cross.is_new(request):
                inputs = [*range(len(request.mm_features))]
                step.output.scheduled_encoder_inputs[request.request_id] = inputs
                step.budget = max(num_new, step.budget - num_encoded)
                if not request.num_charged:
                    self._tenants.charge(options.share, ENCODER_WEIGHT * num_encoded)
            else:
                data.mm_features = [
                    msgspec.structs.replace(item, data={}) for item in request.mm_features
                ]
        if manager.states is not None:
            data.state_slots, data.state_source = manager.states.live_slots(request)
        scheduled = ScheduledRequest(
            request.request_id, num_new, manager.get_block_ids(request), new=data
        )
        if self._loads is not None:
            assert scheduled.new_block_ids is not None
            self._loads.request_started(request, scheduled.new_block_ids, start)
        self._add_to_step(step, request, scheduled, start, request.num_tokens)
        return True

    def _room_beside_encoder(self, step: ScheduledStep, request: Request, num_encoded: int) -> int:
        """Return the number of tokens that a new request may have in a step with its encoder.

        The first input of a step may exceed the step's budget by the tokens of running requests
        that generate: otherwise it would hold the queue until enough of them have ended.

        Args:
            step: the step being scheduled.
            request: the request.
            num_encoded: tokens that the encoder computes for it.
        """
        room = step.budget - num_encoded
        if room > 0 or request.options.background or step.output.scheduled_encoder_inputs:
            return room
        num_used = self.max_num_batched_tokens - step.budget
        if num_used > len(step.entries) * (1 + step.drafts_per_request):
            return room  # prompts, which end soon
        return min(step.budget, self.max_num_batched_tokens - num_encoded)

    def _fit_ranges(
        self, step: ScheduledStep, request: Request, start: int, num_new: int, room: int
    ) -> int:
        """Call `EncoderInputs.fit_ranges`; note if no token fits.

        A request in the background that has not saved enough tokens stops no drafts.
        """
        found = self._encoders.fit_ranges(request, start, num_new, room)
        self._range_waits |= not (found or step.num_left_out)
        return found

    def _leave_budget(self, step: ScheduledStep) -> bool:
        """Return True if requests in the background may add tokens to a step.

        In a step with other requests they may add `BACKGROUND_TOKENS` all together, and those that
        they saved, so that a step takes about as long as without them. They are last in the order
        of service.
        """
        alone = not self.running or self.running[0].options.background
        if not alone and not step.is_shared:
            step.is_shared = True
            allowed = BACKGROUND_TOKENS + self._num_saved
            self._num_saved = 0
            step.num_left_out = max(0, step.budget - allowed)
            step.budget -= step.num_left_out
        return step.budget > 0

    def _save_budget(self, step: ScheduledStep) -> None:
        """Save the rest of a step's budget for later steps, if the background shares the step.

        The next request in the background needs more tokens at once: those that see each other, or
        an encoder's input. It gets them once as many have been saved.
        """
        if step.is_shared:
            self._num_saved = step.budget
            step.num_left_out += step.budget
            step.budget = 0

    def _wait_for_budget(self, step: ScheduledStep, request: Request) -> bool:
        """Note that a request needs more tokens at once than the step has left; return False."""
        if request.options.background:
            self._save_budget(step)
        return self._note_wait(request, WaitReason.BUDGET)

    def _cap(self, num_new: int) -> int:
        """Return `num_new`, or less if the settings limit the prompt tokens of a request."""
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new and self.config.enable_chunked_prefill:
            return threshold
        return num_new

    def _add_to_step(
        self,
        step: ScheduledStep,
        request: Request,
        scheduled: ScheduledRequest,
        start: int,
        total: int,
    ) -> None:
        """Add a request's tokens from `start`; `total` tokens are known or in flight."""
        if start < request.mm_end:
            num_encoded = self._encoders.add(request, scheduled.num_tokens, step.output)
            self._tenants.charge(request.options.share, ENCODER_WEIGHT * num_encoded)
        if self.kv_cache_manager.states is not None:
            scheduled.snapshots = self.kv_cache_manager.states.take_scheduled(request)
        request.num_computed_tokens = end = start + scheduled.num_tokens
        num_sampled = 0
        if request.num_charged < request.num_prompt_tokens:
            # Cached tokens cost nothing; recomputed ones were charged before.
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
        """Notify the listeners why a request does not start; return False, as `_admit` does."""
        for listener in self._listeners:
            listener.on_wait(request, reason)
        return False

    def _preempt(self, request: Request, by: Request | None) -> None:
        """Return a request, just removed from `running`, to the waiting ones.

        Tokens that steps in flight sample for it stay valid: they depend only on its own tokens.
        """
        for listener in self._listeners:
            listener.on_preempt(request, by)
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_forced = 0
        if self._loads is not None:
            request.num_external_tokens = None if self._loads.replace_computing else 0
        request.num_preemptions += 1
        request.has_news = True
        self._num_preemptions += 1
        self._finished_req_ids.append(request.request_id)
        self.waiting.push(request)

    def _free(self, request: Request) -> None:
        """Free the blocks of a running request, and the rows of encoders that it uses."""
        self.kv_cache_manager.free(request)
        if request.mm_features:
            self._encoders.cache.free(request)

    def _preempt_all(self) -> None:
        while self.running:
            self._preempt(self.running.pop(), None)

    def _end_step(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[list[EngineCoreOutput], ScheduledStep | None]:
        """Return the outputs that no step made, and the oldest step, now no longer in flight; None
        if the step was empty."""
        outputs, self._outputs = self._outputs, []
        if not scheduler_output.scheduled_reqs:
            return outputs, None
        step = self._in_flight.popleft()
        assert step.output is scheduler_output, "steps must be updated in order"
        return outputs, step

    def _note_success(self, step: ScheduledStep, result: ModelRunnerOutput) -> None:
        """Count a step and record its time."""
        self._num_steps += 1
        self._num_scheduled_tokens += step.output.total_num_scheduled_tokens
        now = self._clock()
        # The step began when it was scheduled, or when the step before it ended.
        seconds, self._last_result = now - max(step.scheduled_at, self._last_result), now
        self._encoders.pace.step_ended(step.output, step.item_work, seconds)
        self.drafting.learn(step, result, seconds)
        if self._loads is not None and step.entries:
            self._loads.step_succeeded(step, now)

    def _take_result(
        self,
        request: Request,
        start: int,
        num_sampled: int,
        sampled: dict[str, list[int]],
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Apply a step's result to an entry of the step; return the new output, or None.

        This runs once per request and step: code that few requests need is in other functions.
        """
        if request.pooling is not None:
            return self._take_pooled(request, num_sampled, result)
        req_id = request.request_id
        tokens: list[int] = []
        logprobs = prompt_logprobs = finished = None
        if num_sampled:
            tokens = sampled[req_id]
            assert 0 < len(tokens) <= num_sampled, f"{req_id} got {len(tokens)} tokens"
            request.num_output_placeholders -= num_sampled
            request.num_spec_in_flight -= num_sampled - 1
            if request.status == RequestStatus.RUNNING:  # a preempted request starts again
                # Places without an accepted draft add no token.
                request.num_computed_tokens -= num_sampled - len(tokens)
            if result.num_draft_tokens and req_id in result.num_draft_tokens:
                num_drafts = result.num_draft_tokens[req_id]
                self.drafting.count(num_drafts, len(tokens) - 1)
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += len(tokens) - 1
                request.has_news = True
            finished, count = check_stop(request, tokens)
            logprobs = result.logprobs.get(req_id) if result.logprobs else None
            if count < len(tokens):
                tokens = tokens[:count]
                logprobs = logprobs and logprobs.select(0, count)
            request.append_output_token_ids(tokens)
            self._tenants.charge(request.options.share, OUTPUT_WEIGHT * len(tokens))
        if result.prompt_logprobs and req_id in result.prompt_logprobs:
            prompt_logprobs = take_prompt_logprobs(request, start, result.prompt_logprobs[req_id])
        if not tokens and prompt_logprobs is None:
            return None
        output = EngineCoreOutput(req_id, tokens, logprobs, prompt_logprobs)
        if finished is not None:
            if self._connector is not None:
                output.kv_transfer_params = self._connector.request_finished(request)
            self._finish(request, finished)
            output.finish_reason = finished.finish_reason
            output.stop_reason = request.stop_reason
        if request.guard is not None:
            output.repetition = request.guard.found
        if request.has_news or finished is not None:
            request.has_news = not tokens
            _add_statistics(output, request)
        return output

    def _take_pooled(
        self, request: Request, num_sampled: int, result: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        """Apply a step's result to a request of a pooling model; it ends with its last token."""
        if not num_sampled:
            return None
        request.num_output_placeholders -= num_sampled
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.STOP,
            pooled=result.pooled[request.request_id],
        )
        self._finish(request, RequestStatus.FINISHED_STOPPED)
        _add_statistics(output, request)
        return output

    def _end_waits_for_encoders(self) -> None:
        """Queue the requests whose items fit into the step being scheduled."""
        status = RequestStatus.WAITING_FOR_ENCODER
        waiting = {r for r in self._awaiting_encoder if r.status == status}
        for request in self._encoders.next_waiting(waiting, self.waiting.rank):
            waiting.remove(request)
            self.set_ready(request.request_id)
        self._awaiting_encoder = waiting

    def _fail_expired(self, now: float) -> None:
        """Fail the requests that are past a deadline."""
        for request in self._deadlines.find_expired(self.requests.values(), now):
            self._outputs.append(self._fail(request, *describe_expiry(request, now)))
        self._drop_finished_from_running()

    def _fail(self, request: Request, message: str, error_kind: str) -> EngineCoreOutput:
        """End a request with an error; return the output with the error."""
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
        """End a request; the caller drops it from `running`."""
        req_id = request.request_id
        del self.requests[req_id]
        if request.competes:
            request.competes = False
            self._tenants.cease(request.options.share)
        self._tenants.leave(request.options.share)
        if request.status == RequestStatus.RUNNING:
            self._free(request)
            self._finished_req_ids.append(req_id)
        elif request.status in HELD:
            del self._held[req_id]
        else:
            self.waiting.remove(request)
        request.status = status
        if self.adapters is not None:
            self.adapters.remove(request)
            self._turns.blocked.discard(req_id)

    def _drop_finished_from_running(self) -> None:
        running = RequestStatus.RUNNING
        self.running = [request for request in self.running if request.status is running]
        self._release_turns()

    def _release_turns(self) -> None:
        """Queue the requests that wait for the turn of their adapter, if another one may run."""
        for request_id in self._turns.release(self.running):
            if self.requests[request_id].status == RequestStatus.WAITING_FOR_ADAPTER_TURN:
                self.set_ready(request_id)


def _has_come_to_items(request: Request) -> bool:
    """Return True if a step had tokens of a request's items, also before a preemption."""
    begins = (item.begin for item in request.mm_features)
    return request.num_charged > min(begins, default=request.num_prompt_tokens)


def _is_first_prefill(request: Request) -> bool:
    """Return True if a request computes its prompt, and no other one computes it for this one."""
    return not request.num_output_tokens and request.leader is None


def _add_statistics(output: EngineCoreOutput, request: Request) -> None:
    output.num_cached_tokens = request.num_cached_tokens
    output.first_scheduled_time = request.first_scheduled_time
    output.num_preemptions = request.num_preemptions
    output.num_draft_tokens = request.num_draft_tokens
    output.num_accepted_tokens = request.num_accepted_tokens
    output.num_stored_tokens = request.num_stored_tokens


def _progress(step: ScheduledStep, request: Request, start: int) -> EngineCoreOutput:
    """Return the output of a step that computed a part of a request's prompt, from `start`."""
    scheduled = next(s for s in step.output.scheduled_reqs if s.req_id == request.request_id)
    output = EngineCoreOutput(
        request.request_id, [], num_computed_tokens=start + scheduled.num_tokens
    )
    _add_statistics(output, request)
    return output


def _queue_key(request: Request) -> QueueKey:
    return request.queue_key
