"""Listener that reports finished steps to the front end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from octavo.kv_cache.given_up import GivenUp
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerOutput
from octavo.observability.steps import (
    StepEvent,
    StepPart,
    StepPreemption,
    StepRecord,
    StepWait,
)
from octavo.request import Request
from octavo.scheduler.listener import StepListener, WaitReason
from octavo.system.clock import now

MAX_HOLDERS = 16
"""Number of holders of KV blocks that a wait for blocks names."""
HOLDERS_INTERVAL = 0.1
"""Seconds after which a wait of the same request names them again."""


@dataclass(slots=True)
class _Step:
    """Step that is not reported yet; see `StepRecord`."""

    schedule_begun: float
    scheduled: float
    parts: list[StepPart]
    wait: StepWait | None
    preemptions: list[StepPreemption]
    begun: float = 0.0
    computed: float = 0.0
    sample_seconds: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class _Scheduling:
    """Events since the scheduling of a step began."""

    begun: float
    wait: StepWait | None = None
    preemptions: list[StepPreemption] = field(default_factory=list)


class StepReporter(StepListener):
    """Listener that adds a `StepRecord` of each finished step to the engine's outputs.

    A step without requests is not reported, except for events before the engine becomes idle.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._scheduling = _Scheduling(0.0)
        self._steps: dict[int, _Step] = {}
        """Steps in flight, in order."""
        self._done: list[int] = []
        """Steps with a result that the next outputs report."""
        self._last_computed = 0.0
        self._events: list[StepEvent] = []
        """Events that the next outputs report."""
        self._named: tuple[str, float] = "", 0.0
        """Request whose wait has named the holders of blocks last, and the time."""
        self._encoder = msgspec.msgpack.Encoder()

    def on_add(self, request: EngineCoreRequest) -> None:
        """Note the arrival of a request."""
        self._note(request.request_id, "ADDED")

    def on_hold(self, request: Request) -> None:
        """Note that a request is held."""
        self._note(request.request_id, request.status.name)

    def on_ready(self, request: Request) -> None:
        """Note that a request is no longer held."""
        self._note(request.request_id, "READY")

    def on_given_up(self, request: Request, given_up: GivenUp) -> None:
        """Note what the cache gave up."""
        self._events.append(StepEvent(request.request_id, given_up.time, "GIVEN_UP", given_up.by))

    def _note(self, request_id: str, kind: str) -> None:
        self._events.append(StepEvent(request_id, self._clock(), kind))

    def on_begin(self, step: int) -> None:
        """Note the time."""
        self._scheduling = _Scheduling(self._clock())

    def on_wait(self, request: Request, reason: WaitReason) -> None:
        """Keep the reason for the step that is being scheduled."""
        self._scheduling.wait = StepWait(request.request_id, reason.name)

    def on_blocks_missing(self, held: Callable[[], Mapping[str, int]]) -> None:
        """Name the requests that hold the most blocks, if the last names are old."""
        wait, time = self._scheduling.wait, self._clock()
        assert wait is not None
        who, last = self._named
        if who == wait.request_id and time < last + HOLDERS_INTERVAL:
            return
        self._named = wait.request_id, time
        most = heapq.nlargest(MAX_HOLDERS, held().items(), key=itemgetter(1))
        self._scheduling.wait = StepWait(wait.request_id, wait.reason, most)

    def on_preempt(self, request: Request, by: Request | None) -> None:
        """Keep the preemption for the step that is being scheduled, or for the next one."""
        preemption = StepPreemption(request.request_id, None if by is None else by.request_id)
        self._scheduling.preemptions.append(preemption)

    def on_schedule(self, step: int, work: SchedulerOutput) -> None:
        """Begin the record of a step."""
        if not work.scheduled_reqs:
            return
        parts = [
            StepPart(r.req_id, r.num_tokens, r.num_drafts)
            if r.new is None
            else StepPart(
                r.req_id,
                r.num_tokens,
                r.num_drafts,
                r.new.num_computed_tokens,
                len(r.new.token_ids),
            )
            for r in work.scheduled_reqs
        ]
        events = self._scheduling
        self._steps[step] = _Step(
            events.begun, self._clock(), parts, events.wait, events.preemptions
        )

    def on_computed(self, step: int) -> None:
        """Note the times of a step's computation."""
        record, end = self._steps.get(step), self._clock()
        if record is not None and record.computed:
            return  # `on_result` was earlier
        if record is not None:
            record.begun = max(record.scheduled, self._last_computed)
            record.computed = end
        self._last_computed = end

    def on_result(self, step: int, waited: float, failed: bool, sample_seconds: float) -> None:
        """Let the next outputs report the step."""
        if (record := self._steps.get(step)) is not None:
            if not record.computed:  # the thread that computes is late
                self.on_computed(step)
            record.failed, record.sample_seconds = failed, sample_seconds
            self._done.append(step)

    def on_outputs(self, outputs: EngineCoreOutputs, is_idle: bool) -> None:
        """Report the finished steps, and the events with the first of them."""
        if not self._done and not (is_idle and self._events):
            return
        processed = self._clock()
        for number in self._done:
            step = self._steps.pop(number)
            # A step that failed before its computation has no times of it.
            computed = step.computed or processed
            begun = step.begun or min(max(step.scheduled, self._last_computed), computed)
            times = step.schedule_begun, step.scheduled, begun, computed, processed
            report = step.parts, step.wait, step.preemptions, step.failed, step.sample_seconds
            self._report(outputs, StepRecord(number, *times, *report, self._take_events()))
        self._done.clear()
        if self._events:  # the engine is idle
            now = (processed, processed, processed, processed, processed)
            self._report(outputs, StepRecord(0, *now, [], events=self._take_events()))

    def _take_events(self) -> list[StepEvent]:
        events, self._events = self._events, []
        return events

    def _report(self, outputs: EngineCoreOutputs, record: StepRecord) -> None:
        outputs.steps.append(msgspec.Raw(self._encoder.encode(record)))
