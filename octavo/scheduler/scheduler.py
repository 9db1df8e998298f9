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

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

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
    PauseMode,
    SchedulerOutput,
)
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.request import Request, RequestStatus
from octavo.scheduler.adapters import AdapterSlots
from octavo.scheduler.checks import check_adapter, check_books, check_fits, check_transfer
from octavo.scheduler.deadlines import describe_expiry
from octavo.scheduler.encoders import EncoderInputs
from octavo.scheduler.fairness import CREDIT_STEPS, TenantCounters
from octavo.scheduler.kv_loads import KVLoads
from octavo.scheduler.listener import StepListener
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request_table import RequestTable
from octavo.scheduler.results import StepResults
from octavo.scheduler.speculation import Drafting
from octavo.scheduler.step import ScheduledStep
from octavo.scheduler.step_builder import StepBuilder
from octavo.system.clock import now


class Scheduler:
    """Interface of the scheduler, from the arrival of a request to its end.

    `RequestTable` has the requests, `StepBuilder` chooses each step, and `StepResults` applies its
    result.

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

        self.drafting = Drafting(num_speculative_tokens, max_num_drafts)
        self._encoders = EncoderInputs(
            *(encoder_cache_size, max_num_batched_tokens, config.max_num_seqs, encoder_pieces),
            has_cross=self.kv_cache_manager.cross is not None,
        )
        self._connector = connector
        self._loads: KVLoads | None = None
        if connector is not None:
            self._loads = KVLoads(connector, config, self.kv_cache_manager)
        self._table = RequestTable(
            config.scheduling_policy,
            lora,
            tenants=TenantCounters(CREDIT_STEPS * max_num_batched_tokens),
            kv_cache_manager=self.kv_cache_manager,
            encoder_cache=self._encoders.cache,
            loads=self._loads,
            listeners=listeners,
        )
        self._builder = StepBuilder(
            config,
            max_num_batched_tokens,
            num_stages,
            table=self._table,
            kv_cache_manager=self.kv_cache_manager,
            encoders=self._encoders,
            drafting=self.drafting,
            loads=self._loads,
            listeners=listeners,
        )
        self._results = StepResults(
            table=self._table,
            kv_cache_manager=self.kv_cache_manager,
            encoder_cache=self._encoders.cache,
            drafting=self.drafting,
            connector=connector,
        )
        self._in_flight: deque[ScheduledStep] = deque()
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that no step made."""
        self._clock = clock
        self._expert_counts = 0, 0, 0, 0, 0
        self._last_result = -math.inf
        """Time when the last step ended."""
        self._num_steps = 0
        self._num_scheduled_tokens = 0

    @property
    def requests(self) -> dict[str, Request]:
        """All unfinished requests by id."""
        return self._table.requests

    @property
    def running(self) -> list[Request]:
        """Requests with a row in the worker, in order of service."""
        return self._table.running

    @property
    def waiting(self) -> WaitingQueue:
        """Requests in the queue."""
        return self._table.waiting

    @property
    def adapters(self) -> AdapterSlots | None:
        """Adapters in memory; None: adapters are off."""
        return self._table.adapters

    @property
    def paused(self) -> bool:
        """True if new requests are held until `resume`."""
        return self._table.paused

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
        check_transfer(request, self._connector)
        check_adapter(request, enabled=self.adapters is not None)
        if request.mm_end:
            self._encoders.check(request)
        # The context also limits the output. Later code needs only `max_tokens`.
        left = self.max_model_len - request.num_prompt_tokens
        if request.pooling is not None:
            left = 1  # its result takes the place of one token, and no room in the context
        request.max_tokens = min(request.max_tokens, left)
        self._table.add(request)

    def pause(self, mode: PauseMode) -> None:
        """Hold all requests that arrive until `resume`.

        Args:
            mode: effect on unfinished requests. abort: end them with a last output. keep: hold
                them, too, and continue them later from their tokens; no step may be in flight.
                wait: let them continue.
        """
        self._table.paused = True
        if mode == "abort":
            for request in list(self.requests.values()):
                self._table.finish(request, RequestStatus.FINISHED_ABORTED)
                self._outputs.append(
                    EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                )
            self._table.drop_finished()
        elif mode == "keep":
            self._table.preempt_all()
            for request in list(self.waiting):
                self._table.hold(request, RequestStatus.WAITING_FOR_WAKE_UP)

    def resume(self) -> None:
        """End the effects of `pause`."""
        self._table.resume()

    def hold(self, request_id: str, status: RequestStatus) -> None:
        """Remove a waiting request from the queue until `set_ready`.

        Args:
            request_id: a request that waits.
            status: the reason, one of `HELD`.
        """
        self._table.hold(self.requests[request_id], status)

    def set_ready(self, request_id: str) -> None:
        """Move a held request to its place in the queue; see `RequestTable.set_ready`."""
        self._table.set_ready(request_id)

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
            self._outputs.append(self._table.fail(request, message, error_kind))
            self._table.drop_finished()

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests in any state, without outputs; ignore ids of finished ones.

        The results of steps in flight are dropped for these requests.
        """
        assert status.finished, status
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._table.finish(request, status)
        self._table.drop_finished()

    def schedule(self) -> SchedulerOutput:
        """Return the next step; it may be empty."""
        table, now = self._table, self._clock()
        if now >= table.deadlines.next:
            self._fail_expired(now)
        busy = self._find_busy() if self.num_stages > 1 else frozenset[Request]()
        step = self._builder.build(now, busy)
        output = step.output
        output.finished_req_ids = table.take_finished()
        if table.adapters is not None:
            output.adapter_changes = table.adapters.take_changes()
        if self._loads is not None:
            self._loads.complete_step(output)
        if step.entries:
            self._in_flight.append(step)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Apply the result of the oldest step in flight.

        See `StepResults.apply` for requests in `errors`.

        Returns:
            The new outputs, in batch order.
        """
        outputs, step = self._end_step(scheduler_output)
        if step is None:
            return outputs
        result, num_requests = model_runner_output, len(self._table.requests)
        self._expert_counts = max(self._expert_counts, result.expert_counts)
        if result.forget_prefixes:
            self.kv_cache_manager.forget_prefixes()
        self._note_success(step, result)
        self._results.apply(step, result, outputs)
        if len(self._table.requests) < num_requests:
            self._table.drop_finished()
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
            outputs += [self._table.fail(r, message, "StepFailedError") for r in failing]
        self._table.drop_finished()
        self._table.preempt_all()
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
            len(self.requests) > len(self._table.held)
            or self._table.finished_req_ids
            or self._outputs
            or self._builder.has_waits
            or (self.adapters is not None and self.adapters.has_changes)
            or (self._table.held and self._clock() >= self.next_held_deadline)
        )

    @property
    def only_awaits_results(self) -> bool:
        """True if a step scheduled now would be empty, since steps in flight compute all requests.

        That is so if every request returns vectors or scores, and none waits.
        """
        return (
            len(self.running) == len(self.requests)
            and not (self._table.finished_req_ids or self._outputs)
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
        return self._table.held.next_deadline

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
            self._table.preempt_all()
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
            num_waiting_reqs=len(self.waiting) + len(self._table.held),
            kv_cache_usage=manager.usage,
            num_used_blocks=manager.num_used_blocks,
            num_total_blocks=manager.pool.num_usable_blocks,
            prefix_cache_queries=manager.num_queries,
            prefix_cache_hits=manager.num_hits,
            num_preemptions=self._table.num_preemptions,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_drafts=drafting.num_drafts,
            num_draft_tokens=drafting.num_draft_tokens,
            num_accepted_tokens_per_pos=drafting.num_accepted_tokens_per_pos.copy(),
            num_held_reqs=len(self._table.held),
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
        others = [*self.waiting, *self._table.held.values()]
        most = self.config.max_num_seqs
        check_books(self.requests, self.running, others, self._in_flight, most)
        self.kv_cache_manager.check_integrity(self.running)
        self._encoders.cache.check_integrity(self.running)
        if self.adapters is not None:
            self.adapters.check_integrity(self.requests.values())

    def _find_busy(self) -> frozenset[Request]:
        """Return the requests that sample in the steps that the stages have not finished.

        The others are computed at the same time, so that no stage waits for another.
        """
        last = list(self._in_flight)[1 - self.num_stages :]
        return frozenset(
            request for step in last for request, _, sampled in step.entries if sampled
        )

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

    def _fail_expired(self, now: float) -> None:
        """Fail the requests that are past a deadline."""
        for request in self._table.deadlines.find_expired(self.requests.values(), now):
            self._outputs.append(self._table.fail(request, *describe_expiry(request, now)))
        self._table.drop_finished()
