"""The choice of a step's requests and of the number of tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.config import SchedulerConfig
from octavo.kv_cache.manager import KVCacheBlocks, KVCacheManager
from octavo.messages import NewRequestData, ScheduledRequest, SchedulerOutput
from octavo.request import Request, RequestStatus
from octavo.scheduler.background import BackgroundShare
from octavo.scheduler.encoders import EncoderInputs
from octavo.scheduler.fairness import ENCODER_WEIGHT, PROMPT_WEIGHT
from octavo.scheduler.held import HELD
from octavo.scheduler.kv_loads import KVLoads
from octavo.scheduler.listener import StepListener, WaitReason
from octavo.scheduler.queue import BACKGROUND
from octavo.scheduler.request_table import RequestTable
from octavo.scheduler.speculation import Drafting
from octavo.scheduler.step import ScheduledStep


class StepBuilder:
    """Chooser of the requests of each step and of their numbers of tokens.

    The running requests are sorted and scheduled in the order of service, and then the waiting
    ones. The last running request is preempted if blocks run out. Thus a preempted request is not
    in the same step yet, and the first request always makes progress.

    Args:
        config: the scheduler's settings.
        budget: most tokens of a step.
        num_stages: steps that are computed at the same time (pipeline parallelism).
        table: all unfinished requests.
        kv_cache_manager: manager of the blocks.
        encoders: chooser of the items that encoders compute.
        drafting: places for drafts.
        loads: loads of a KV connector; None: there is no connector.
        listeners: notified when requests wait.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        budget: int,
        num_stages: int,
        *,
        table: RequestTable,
        kv_cache_manager: KVCacheManager,
        encoders: EncoderInputs,
        drafting: Drafting,
        loads: KVLoads | None,
        listeners: Sequence[StepListener],
    ) -> None:
        self._config, self._budget, self._num_stages = config, budget, num_stages
        self._table = table
        self._kv_cache_manager, self._encoders = kv_cache_manager, encoders
        self._drafting, self._loads, self._listeners = drafting, loads, listeners
        self._background = BackgroundShare()
        self._in_order = False
        """True if the next step respects only the order of service; see `_share_prefill`."""
        self._range_waits = False
        """True if tokens that see each other found no room in the last step: the next one has no
        drafts."""
        self._awaiting_encoder: set[Request] = set()
        """Requests held until the next step, because of their items; some may have ended."""

    @property
    def has_waits(self) -> bool:
        """True if the next step may queue requests that wait for their items."""
        return bool(self._awaiting_encoder)

    def build(self, now: float, busy: frozenset[Request]) -> ScheduledStep:
        """Return the next step; it may have no requests.

        Args:
            now: the time.
            busy: requests that would delay the step; see `ScheduledStep.busy`.
        """
        table, output = self._table, SchedulerOutput()
        waiting = table.waiting
        self._encoders.begin_step(table.running)
        if self._awaiting_encoder:
            self._end_waits_for_encoders()
        num_running = len(table.running)
        step = ScheduledStep(
            output,
            self._budget,
            0 if self._range_waits else self._drafting.max_num_drafts,
            self._drafting.choose(num_running, now),
            self._drafting.forced_per_request(num_running),
            now,
            busy=busy,
        )
        self._range_waits = False
        prefills = self._schedule_running(step, now)
        if prefills:
            self._share_prefill(step, now, prefills)
        if not step.preempted:
            while waiting and step.budget:
                request = waiting.peek()
                if not (self._admit(step, now, preempt=False) or request.status in HELD):
                    break
            if waiting and not step.budget:
                self._note_wait(waiting.peek(), WaitReason.BUDGET)
        if step.busy and not step.entries:  # better than an empty step
            step.busy = frozenset()
            self._schedule_running(step, now)
        output.total_num_scheduled_tokens = self._budget - step.budget - step.num_left_out
        output.blocks_to_copy = self._kv_cache_manager.take_blocks_to_copy()
        step.item_work = self._encoders.end_step(output)
        return step

    def _schedule_running(self, step: ScheduledStep, now: float) -> list[Request]:
        """Schedule the next tokens of each running request, in order of service.

        Returns:
            If several tenants compete, the requests with more than one token to compute: they
            share the rest of the budget with the waiting ones.
        """
        table, waiting, running = self._table, self._table.waiting, self._table.running
        share = self._table.tenants.several_compete and not self._in_order
        self._in_order = False
        prefills: list[Request] = []
        allocate_slots, encoders = self._kv_cache_manager.allocate_slots, self._encoders
        may_overtake = bool(waiting and running) and (
            waiting.peek().queue_key[0] < running[-1].queue_key[0]
        )
        # Divide the decoding requests among the stages.
        seats = -(-len(running) // self._num_stages)
        i = 0
        while i < len(running) and step.budget:
            request = running[i]
            if request in step.busy:
                i += 1
                continue
            priority = request.queue_key[0]
            if may_overtake and waiting and waiting.peek().queue_key[0] < priority:
                # It enters `running` at or before i, so i is still the index of the next one.
                may_overtake = self._admit(step, now, preempt=True)
                i += may_overtake
                continue
            if priority == BACKGROUND and not self._may_add_background(step):
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
                    self._background.save(step)
                num_new = encoders.fit(request, start, num_new)
                if not num_new:
                    i += 1
                    continue
            new = allocate_slots(request, num_new + num_drafts) if num_drafts else None
            if new is None:
                num_drafts = 0  # no request is preempted for drafts
            while new is None and (new := allocate_slots(request, num_new)) is None:
                victim = table.preempt_last(request)
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
        waiting, rank = self._table.waiting, self._table.waiting.rank
        prefills = [request for request in prefills if request.status == RequestStatus.RUNNING]
        may_admit = not step.preempted
        while prefills and step.budget:
            request = min(prefills, key=rank)
            if may_admit and waiting and rank(waiting.peek()) < rank(request):
                may_admit = self._admit(step, now, preempt=False)
                continue
            prefills.remove(request)
            if request.options.background and not self._may_add_background(step):
                break
            start = request.num_computed_tokens
            total = request.num_tokens + request.num_output_placeholders
            num_new = min(self._cap(total - start), step.budget)
            if start < request.mm_end:
                num_new = self._fit_ranges(step, request, start, num_new, step.budget)
                if not num_new and request.options.background:
                    self._background.save(step)
                num_new = self._encoders.fit(request, start, num_new)
                if not num_new:
                    continue
            new = self._kv_cache_manager.allocate_slots(request, num_new)
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
        table = self._table
        request = table.waiting.peek()
        if request.num_output_placeholders:
            # The request was preempted, and steps in flight sample tokens for it.
            return self._note_wait(request, WaitReason.IN_FLIGHT)
        if request.options.background and not self._may_add_background(step):
            return self._note_wait(request, WaitReason.BUDGET)
        manager, options = self._kv_cache_manager, request.options
        if manager.waits_for_leader(request):
            return self._note_wait(request, WaitReason.LEADER)
        if not table.turns.may_start(request, table.running):
            table.hold(request, RequestStatus.WAITING_FOR_ADAPTER_TURN)
            return False
        whole = request.whole or not self._config.enable_chunked_prefill
        num_encoded = 0 if manager.cross is None else manager.cross.num_encoder_tokens(request)
        if num_encoded and self._encoders.must_wait(
            request, table.running, self._table.tenants.served
        ):
            return self._note_wait(request, WaitReason.ENCODER)
        while True:
            hit, start = manager.get_computed_blocks(request)
            if self._loads is not None and self._loads.must_wait(
                request, hit, len(table.running), now
            ):
                table.hold(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
                return self._note_wait(request, WaitReason.REMOTE_KVS)
            room = self._room_beside_encoder(step, request, num_encoded)
            if room <= 0:
                return self._wait_for_budget(step, request)
            num_new = request.num_tokens - start
            if not whole:
                num_new = self._cap(num_new)
            # Only a preempted request can be longer than a whole budget; it is split anyway.
            whole &= num_new <= self._budget - num_encoded
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
                table.hold(request, RequestStatus.WAITING_FOR_ENCODER)
                self._awaiting_encoder.add(request)
                return self._note_wait(request, WaitReason.ENCODER)
            seats = self._config.max_num_seqs
            if options.turn > 0:  # the last eighth is for the first requests of calls
                seats -= seats // 8
            has_seat = len(table.running) < seats
            if has_seat and manager.allocate_slots(request, num_new, hit) is not None:
                break
            worst = table.running[-1] if preempt and table.running else None
            if worst is None or worst.queue_key[0] <= request.queue_key[0]:
                self._note_wait(request, WaitReason.BLOCKS if has_seat else WaitReason.SEAT)
                if has_seat:
                    for listener in self._listeners:
                        listener.on_blocks_missing(manager.num_held_blocks)
                return False
            table.preempt_last(request)
            step.preempted = True
        table.start(request)
        if request.first_scheduled_time is None:
            self._note_first_start(request, hit, start, now)
        is_encoded = manager.cross is not None and manager.cross.is_new(request)
        if is_encoded:
            self._add_encoder_input(step, request, num_new, num_encoded)
        data = self._data_for_worker(request, start)
        if manager.cross is not None and not is_encoded:
            data.mm_features = [
                msgspec.structs.replace(item, data={}) for item in request.mm_features
            ]
        scheduled = ScheduledRequest(
            request.request_id, num_new, manager.get_block_ids(request), new=data
        )
        if self._loads is not None:
            assert scheduled.new_block_ids is not None
            self._loads.request_started(request, scheduled.new_block_ids, start)
        self._add_to_step(step, request, scheduled, start, request.num_tokens)
        return True

    def _note_first_start(
        self, request: Request, hit: KVCacheBlocks, start: int, now: float
    ) -> None:
        """Record that a request starts for the first time, at token `start`."""
        request.first_scheduled_time = now
        request.num_cached_tokens = min(start, request.num_prompt_tokens)
        request.num_stored_tokens = hit.num_stored
        if (given_up := self._kv_cache_manager.given_up_after(request, start)) is not None:
            for listener in self._listeners:
                listener.on_given_up(request, given_up)

    def _add_encoder_input(
        self, step: ScheduledStep, request: Request, num_new: int, num_encoded: int
    ) -> None:
        """Add the input of an encoder with cross attention to a step.

        Args:
            step: the step being scheduled.
            request: the request, which starts.
            num_new: number of its tokens in the step.
            num_encoded: tokens that the encoder computes for it.
        """
        self._encoders.add_run(request, self._table.running, self._table.tenants.served)
        inputs = [*range(len(request.mm_features))]
        step.output.scheduled_encoder_inputs[request.request_id] = inputs
        step.budget = max(num_new, step.budget - num_encoded)
        if not request.num_charged:
            self._table.tenants.charge(request.options.share, ENCODER_WEIGHT * num_encoded)

    def _data_for_worker(self, request: Request, start: int) -> NewRequestData:
        """Return what the workers need of a request that starts at token `start`."""
        adapters, states = self._table.adapters, self._kv_cache_manager.states
        data = NewRequestData(
            request.all_token_ids.copy(),
            request.num_prompt_tokens,
            request.sampling_params,
            start,
            private=request.options.cache_salt is not None,
            prompt_embeds=request.prompt_embeds,
            pooling=request.pooling,
            adapter_slot=-1 if adapters is None else adapters.slot_of(request),
            adapter_begin=request.options.adapter_begin,
        )
        if request.mm_features:
            data.mm_features = self._encoders.data_for_worker(request, start)
        if states is not None:
            data.state_slots, data.state_source = states.live_slots(request)
        return data

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
        num_used = self._budget - step.budget
        if num_used > len(step.entries) * (1 + step.drafts_per_request):
            return room  # prompts, which end soon
        return min(step.budget, self._budget - num_encoded)

    def _fit_ranges(
        self, step: ScheduledStep, request: Request, start: int, num_new: int, room: int
    ) -> int:
        """Call `EncoderInputs.fit_ranges`; note if no token fits.

        A request in the background that has not saved enough tokens stops no drafts.
        """
        found = self._encoders.fit_ranges(request, start, num_new, room)
        self._range_waits |= not (found or step.num_left_out)
        return found

    def _may_add_background(self, step: ScheduledStep) -> bool:
        """Return True if requests in the background may add tokens to a step."""
        running = self._table.running
        return self._background.begin(step, alone=not running or running[0].options.background)

    def _wait_for_budget(self, step: ScheduledStep, request: Request) -> bool:
        """Note that a request needs more tokens at once than the step has left; return False."""
        if request.options.background:
            self._background.save(step)
        return self._note_wait(request, WaitReason.BUDGET)

    def _cap(self, num_new: int) -> int:
        """Return `num_new`, or less if the settings limit the prompt tokens of a request."""
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_new and self._config.enable_chunked_prefill:
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
            self._table.tenants.charge(request.options.share, ENCODER_WEIGHT * num_encoded)
        if self._kv_cache_manager.states is not None:
            scheduled.snapshots = self._kv_cache_manager.states.take_scheduled(request)
        request.num_computed_tokens = end = start + scheduled.num_tokens
        num_sampled = 0
        if request.num_charged < request.num_prompt_tokens:
            # Cached tokens cost nothing; recomputed ones were charged before.
            first, end = max(start, request.num_charged), min(end, request.num_prompt_tokens)
            if first < end:
                self._table.tenants.charge(request.options.share, PROMPT_WEIGHT * (end - first))
                request.num_charged = end
        if request.num_computed_tokens >= total:
            self._table.cease_to_compete(request)
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

    def _end_waits_for_encoders(self) -> None:
        """Queue the requests whose items fit into the step being scheduled."""
        table, status = self._table, RequestStatus.WAITING_FOR_ENCODER
        waiting = {r for r in self._awaiting_encoder if r.status == status}
        for request in self._encoders.next_waiting(waiting, table.waiting.rank):
            waiting.remove(request)
            table.set_ready(request.request_id)
        self._awaiting_encoder = waiting
