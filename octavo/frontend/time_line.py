"""Time line of a request: each moment from its arrival to its end has one cause.

The front end's marks and the records of the engine's steps are put together by a sweep from begin
to end. A cursor only moves forward, so the spans do not overlap and leave no gap, whatever the
records say: they sum to the wall time.

A request is in several requests of the core if it has several prompts or answers. The time line
follows the core's request that ended last. All steps of a beam search are followed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.frontend.step_log import EngineDeath, LoggedStep
from octavo.observability.steps import StepEvent, StepPart, StepRecord
from octavo.system import clock

_HELD = {
    "WAITING_FOR_FSM": "grammar",
    "WAITING_FOR_REMOTE_KVS": "kv_load",
    "WAITING_FOR_WAKE_UP": "asleep",
    "WAITING_FOR_ADAPTER": "adapter",
    "WAITING_FOR_ADAPTER_TURN": "adapter_turn",
    "WAITING_FOR_ENCODER": "encoder",
}
"""Causes by the name of the status of a held request."""
STEPS = frozenset({"prefill", "recompute", "decode", "failed_step"})
"""Causes of time in which the engine computes the request."""
_AT_ONCE = frozenset({"BUDGET", "BLOCKS"})
"""Reasons of which `Span.who` has the most at one time."""
BETWEEN = "between_steps"
"""Cause of the engine's own work between steps of the request."""


def number_of(core_id: str) -> int | None:
    """Return the number by which the server knows the core's request; None: it is not its own.

    An id ends with this number, `#` and the front end's number; a client may choose what is before.
    """
    number = core_id.rpartition("#")[0].rpartition("-")[2]
    return int(number) if number.isascii() and number.isdecimal() else None


@dataclass(slots=True)
class Stages:
    """Notes of the front end on a prompt on its way to the engine."""

    ends: list[tuple[str, float]] = field(default_factory=list)
    """Causes of the time, in order, with their ends."""
    holder: tuple[int, int] | None = None
    """Another engine that likely had more of the prompt in its cache, and the number of tokens."""

    def end(self, cause: str) -> None:
        """Note that a stage ends."""
        self.ends.append((cause, clock.now()))


@dataclass(slots=True)
class Span:
    """Part of a time line.

    Attributes:
        begin: time of `octavo.system.clock`.
        end: its end.
        cause: name of the cause.
        reason: with `queued` the name of a `WaitReason`.
        is_behind: with `queued`: another request was the first in the queue.
        steps: number of steps.
        tokens: number of tokens of this request in them, drafts included.
        others: most other requests in one of the steps; with `queued`, that ran meanwhile.
        who: other requests that are the cause, by id in the core, with what they had: tokens in the
            steps; with `queued` for BUDGET the most tokens in a step, for BLOCKS the most KV blocks
            (0: unknown); otherwise seconds.
        behind: with `is_behind`: the requests that were the first in the queue, with the seconds.
        theirs: seconds of the steps, divided by tokens, that other requests took.
        between: seconds between the steps, which are no span of their own.
    """

    begin: float
    end: float
    cause: str
    reason: str | None = None
    is_behind: bool = False
    steps: int = 0
    tokens: int = 0
    others: int = 0
    theirs: float = 0.0
    between: float = 0.0
    who: dict[str, float] = field(default_factory=dict)
    behind: dict[str, float] = field(default_factory=dict)

    def takes(self, other: Span) -> bool:
        """Return True if a later span continues this one."""
        kind = self.cause, self.reason, self.is_behind
        return kind == (other.cause, other.reason, other.is_behind)

    def add(self, other: Span) -> None:
        """Add the next span, of the same kind."""
        self.end = other.end
        self.steps += other.steps
        self.tokens += other.tokens
        self.others = max(self.others, other.others)
        self.theirs += other.theirs
        self.between += other.between
        is_most = self.reason in _AT_ONCE
        for who, amount in other.who.items():
            known = self.who.get(who, 0.0)
            self.who[who] = max(known, amount) if is_most else known + amount
        for who, amount in other.behind.items():
            self.behind[who] = self.behind.get(who, 0.0) + amount


@dataclass(slots=True)
class Marks:
    """The front end's marks of a request; times of `octavo.system.clock`.

    Attributes:
        begin: arrival.
        end: end of the request, or now.
        stages: causes of the time before the engine, in order, with their ends.
        prompts: further stages of each prompt, by the number of its core's requests (`number_of`).
        is_one: True if all of these requests are followed.
        done: time at which the front end expected no more outputs; None: it still does.
        is_complete: True if it had all outputs then.
        blocked: times in which the client did not read, in order.
        ready: time at which the model was loaded; None: unknown, or before all requests.
    """

    begin: float
    end: float
    stages: Sequence[tuple[str, float]] = ()
    prompts: Mapping[int, Sequence[tuple[str, float]]] = field(default_factory=dict)
    is_one: bool = False
    done: float | None = None
    is_complete: bool = False
    blocked: Sequence[tuple[float, float]] = ()
    ready: float | None = None


@dataclass(slots=True)
class Answer:
    """What the steps tell about a core's request.

    Attributes:
        core_id: its id in the core.
        first, last: begin of its first step, and end of its last.
        num_steps: number of its steps.
        num_chunks: number of its steps of cause `prefill`.
        num_tokens: number of computed tokens.
        num_cached: tokens found in the cache in its first step.
        num_preemptions: number of its preemptions.
        is_resumed: True if it started again, after a preemption or an engine's death.
        given_up: the event GIVEN_UP.
    """

    core_id: str
    first: float
    last: float
    num_steps: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    is_resumed: bool = False
    given_up: StepEvent | None = None


@dataclass(slots=True)
class TimeLine:
    """Result: the spans in order, and the core's requests by id."""

    spans: list[Span]
    answers: dict[str, Answer]
    followed: str | None
    """Id of the core's request that the time line follows; None: none had a step."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each cause; they sum to the wall time."""
        found: dict[str, float] = {}
        for span in self.spans:
            seconds = span.end - span.begin - span.between
            found[span.cause] = found.get(span.cause, 0.0) + seconds
            if span.between:
                found[BETWEEN] = found.get(BETWEEN, 0.0) + span.between
        return found


class _Own(NamedTuple):
    """Step with a part of the followed request."""

    engine: int
    place: int
    """Index in the engine's steps."""
    record: StepRecord
    part: StepPart
    cause: str


@dataclass(slots=True)
class _Engine:
    """Steps of an engine in order, and their begins."""

    steps: list[StepRecord] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)

    def around(self, begin: float, end: float) -> Iterator[StepRecord]:
        """Yield the steps that may overlap a time."""
        first = max(0, bisect.bisect_right(self.begins, begin) - 1)
        for i in range(first, len(self.steps)):
            if self.steps[i].schedule_begun > end:
                return
            yield self.steps[i]


def make_time_line(
    marks: Marks, steps: Iterable[LoggedStep], deaths: Iterable[EngineDeath] = (), lost: float = 0.0
) -> TimeLine:
    """Return the time line of a request.

    Args:
        marks: the front end's marks.
        steps: all steps that the log has of the time from `marks.begin` to `marks.end`.
        deaths: deaths of engines.
        lost: time up to which the log has dropped steps.
    """
    return _Sweep(marks, steps, deaths, lost).run()


class _Sweep:
    """The sweep; see `make_time_line`."""

    def __init__(
        self,
        marks: Marks,
        steps: Iterable[LoggedStep],
        deaths: Iterable[EngineDeath],
        lost: float,
    ) -> None:
        self._marks = marks
        self._lost = lost
        self._deaths = sorted(deaths)
        self._engines: dict[int, _Engine] = {}
        self._events: list[tuple[int, StepEvent]] = []
        """Events of the request's core requests, with their engine."""
        self._preempted: list[tuple[int, float, str, str | None]] = []
        """Preemptions of these: engine, time, id, and the request that needed the blocks."""
        self.answers: dict[str, Answer] = {}
        self._read(steps)
        self._spans: list[Span] = []
        self._cursor = marks.begin

    def _is_own(self, core_id: str) -> bool:
        return number_of(core_id) in self._marks.prompts

    def _read(self, steps: Iterable[LoggedStep]) -> None:
        """Sort the records by engine; note what concerns the request."""
        for logged in steps:
            record, index = logged.record, logged.engine_index
            for event in record.events:
                if self._is_own(event.request_id):
                    self._events.append((index, event))
            for preemption in record.preemptions:
                if self._is_own(preemption.request_id):
                    who = preemption.request_id, preemption.by
                    self._preempted.append((index, record.schedule_begun, *who))
            if record.number:
                engine = self._engines.setdefault(index, _Engine())
                engine.steps.append(record)
                engine.begins.append(record.begun)
        self._events.sort(key=lambda item: item[1].time)

    def _own_steps(self) -> tuple[list[_Own], str | None]:
        """Return the followed steps in order, and the id of the followed request."""
        found: list[_Own] = []
        for index, engine in self._engines.items():
            for place, record in enumerate(engine.steps):
                for part in record.parts:
                    if self._is_own(part.request_id):
                        found.append(_Own(index, place, record, part, ""))
        found.sort(key=lambda own: own.record.begun)
        left: dict[str, int] = {}
        """Tokens to compute before the next new one."""
        for i, (_, _, record, part, _) in enumerate(found):
            name, cause = part.request_id, "decode"
            if part.num_known_tokens is not None:
                left[name] = part.num_prompt_tokens - part.num_known_tokens
                if name in self.answers:
                    self.answers[name].is_resumed = True
            answer = self.answers.get(name)
            if answer is None:
                answer = Answer(name, record.begun, record.computed)
                answer.num_cached = part.num_known_tokens or 0
                self.answers[name] = answer
            if left.get(name, 0) > 0:
                cause = "recompute" if answer.is_resumed else "prefill"
                left[name] -= part.num_tokens
            answer.last = max(answer.last, record.computed)
            answer.num_steps += 1
            answer.num_tokens += part.num_tokens
            answer.num_chunks += cause == "prefill"
            found[i] = found[i]._replace(cause="failed_step" if record.failed else cause)
        for _, event in self._events:
            if event.kind == "GIVEN_UP" and event.request_id in self.answers:
                self.answers[event.request_id].given_up = event
        for _, _, core_id, _ in self._preempted:
            if core_id in self.answers:
                self.answers[core_id].num_preemptions += 1
        last = max(self.answers.values(), key=lambda answer: answer.last, default=None)
        followed = None if last is None else last.core_id
        if not self._marks.is_one:
            found = [own for own in found if own.part.request_id == followed]
        return found, followed

    def run(self) -> TimeLine:
        """Make the time line."""
        marks = self._marks
        steps, followed = self._own_steps()
        stages = list(marks.stages)
        if marks.prompts:
            number = None if followed is None else number_of(followed)
            stages += marks.prompts[max(marks.prompts) if number is None else number]
        # The engine may be faster than the front end, which marks the sending when it has its turn.
        sent = steps[0].record.begun if steps else marks.end
        for cause, time in stages:
            self._to(min(time, sent), cause)
        if marks.prompts:
            if marks.ready is not None:
                latest = marks.end if marks.done is None else marks.done
                if steps:
                    latest = steps[0].record.begun
                self._to(min(marks.ready, latest), "model_load")
            before: _Own | None = None
            for own in steps:
                self._gap(before, own, followed)
                self._step(own)
                before = own
            if before is not None and marks.is_complete:
                self._to(before.record.processed, BETWEEN)
            else:
                self._gap(before, None, followed)
        self._deliver()
        return TimeLine(self._spans, self.answers, followed)

    def _to(self, end: float, cause: str, **facts: object) -> Span | None:
        """Move the cursor to a time, with the cause of the time before it."""
        end = min(end, self._marks.end)
        if end <= self._cursor:
            return None
        span = Span(self._cursor, end, cause, **facts)  # type: ignore[arg-type]
        self._cursor = end
        spans = self._spans
        if spans and spans[-1].takes(span):
            spans[-1].add(span)
        elif (
            len(spans) > 1
            and cause in STEPS
            and spans[-1].cause == BETWEEN
            and spans[-2].takes(span)
        ):
            gap = spans.pop()
            spans[-1].between += gap.end - gap.begin
            spans[-1].add(span)
        else:
            spans.append(span)
        return span

    def _step(self, own: _Own) -> None:
        record, part = own.record, own.part
        total = sum(other.num_tokens for other in record.parts)
        who = self._others(record)
        mine = total - sum(who.values())
        seconds = max(0.0, min(record.computed, self._marks.end) - max(self._cursor, record.begun))
        self._to(record.begun, BETWEEN)
        theirs = seconds * (1 - mine / total) if total else 0.0
        self._to(
            record.computed,
            own.cause,
            steps=1,
            tokens=mine if self._marks.is_one else part.num_tokens,
            others=len(who),
            theirs=theirs,
            who=who,
        )

    def _others(self, record: StepRecord) -> dict[str, float]:
        """Return the tokens of each other request in a step."""
        return {
            part.request_id: part.num_tokens
            for part in record.parts
            if not self._is_own(part.request_id)
        }

    def _deliver(self) -> None:
        """Fill the rest: the client did not read, or the front end worked."""
        for begin, end in self._marks.blocked:
            if end > self._cursor:
                self._to(begin, "deliver")
                self._to(end, "client")
        self._to(self._marks.end, "deliver")

    def _gap(self, before: _Own | None, own: _Own | None, followed: str | None) -> None:
        """Fill the time up to the next step of the request; `own` None: up to the end.

        Deaths of the engine divide the time into lives, each with its own arrival.
        """
        end = min(self._marks.end if own is None else own.record.begun, self._marks.end)
        if own is None and self._marks.done is not None:
            end = min(end, self._marks.done)
        if end <= self._cursor:
            return
        if self._lost > self._cursor:
            self._to(min(self._lost, end), "not_recorded")
        engine = self._engine_at(before, own)
        is_running = before is not None and not _is_next_beam(before, own)
        # The engine may have it, or take its blocks, before the cursor's time.
        since = self._marks.begin if before is None else before.record.scheduled
        if before is not None and own is not None and own.engine != before.engine:
            moved = [e.time for i, e in self._events if e.kind == "ADDED" and i == own.engine]
            self._to(min([end, *(t for t in moved if t > self._cursor)]), "engine_death")
            is_running = False
        else:
            for death in self._deaths:
                if death.engine_index != engine or not self._cursor < death.time <= end:
                    continue
                detected = death.time - death.seconds
                known = [
                    step.processed
                    for step in self._engine(engine).steps
                    if step.processed <= detected
                ]
                self._life(max(known, default=detected), engine, since, is_running, None, followed)
                since = death.time
                self._to(death.time, "engine_death")
                is_running = False
        self._life(end, engine if own is None else own.engine, since, is_running, own, followed)

    def _engine_at(self, before: _Own | None, own: _Own | None) -> int:
        """Return the engine that has the request at the cursor, as far as known."""
        if before is not None:
            return before.engine
        at = [index for index, event in self._events if event.time <= self._cursor]
        if at:
            return at[-1]
        if own is not None:
            return own.engine
        return self._events[0][0] if self._events else 0

    def _engine(self, index: int) -> _Engine:
        return self._engines.get(index, _Engine())

    def _life(
        self,
        end: float,
        index: int,
        since: float,
        is_running: bool,
        own: _Own | None,
        followed: str | None,
    ) -> None:
        """Fill a time in which one engine has the request.

        Args:
            end: end of the time.
            index: the engine.
            since: time from which events may be the reason.
            is_running: True if the request ran before.
            own: the step of the request that ends the time.
            followed: id of the followed request.
        """
        begin, end = self._cursor, min(end, self._marks.end)
        if end <= begin:
            return
        steps = list(self._engine(index).around(begin, end))
        waits = _Waits(begin, is_running, math.inf if own is None else own.record.schedule_begun)
        for engine, event in self._events:
            if engine == index and since <= event.time < end:
                waits.note(event, followed, self._marks.is_one)
        for engine, time, core_id, by in self._preempted:
            mine = engine == index and since <= time < end and core_id == followed
            if mine and time < waits.preempted:
                waits.preempted, waits.preempted_by = time, by
        cuts = {begin, end, *waits.cuts()}
        for step in steps:
            cuts |= {step.schedule_begun, step.begun, step.computed}
        ordered = sorted(cut for cut in cuts if begin <= cut <= end)
        place = 0
        for a, b in itertools.pairwise(ordered):
            while place < len(steps) and steps[place].computed <= a:
                place += 1
            busy = place < len(steps) and steps[place].begun <= a
            self._wait(a, b, waits, steps, steps[place] if busy else None)

    def _wait(
        self,
        begin: float,
        end: float,
        waits: _Waits,
        steps: list[StepRecord],
        busy: StepRecord | None,
    ) -> None:
        """Fill a time in which nothing changes; `busy`: others' step that the engine computes."""
        held = waits.held_at(begin)
        if begin < waits.added:
            self._idle(end, busy, "to_engine")
        elif held is not None:
            self._to(end, held)
        elif begin >= waits.preempted and begin < waits.until:
            by, seconds = waits.preempted_by, min(end, self._marks.end) - self._cursor
            known = by is not None and not self._is_own(by)
            self._to(end, "preempted", who={by: seconds} if known else {})
        elif waits.waits_at(begin):
            since = waits.since(begin)
            last = None
            for step in steps:
                if since <= step.schedule_begun <= begin:
                    last = step
            # Without a reason it was not in the queue yet.
            if last is None or not (last.wait or last.preemptions):
                self._idle(end, busy, BETWEEN)
            else:
                self._queued(end, last)
        elif any(a <= begin < b for a, b in self._marks.blocked) and busy is None:
            self._to(end, "client")
        else:
            self._idle(end, busy, BETWEEN)

    def _idle(self, end: float, busy: StepRecord | None, cause: str) -> None:
        """Fill a time with a step of other requests, or with a cause if no step runs."""
        if busy is None:
            self._to(end, cause)
        else:
            seconds = min(end, self._marks.end) - self._cursor
            self._to(end, "step_of_others", who=dict.fromkeys(self._others(busy), seconds))

    def _queued(self, end: float, last: StepRecord) -> None:
        """Fill a time in the queue; `last` is the step that left the request out."""
        who = self._others(last)
        others = len(who)
        if last.wait is None:
            # After a preemption a step starts no request.
            who = {p.by: 0.0 for p in last.preemptions if p.by and not self._is_own(p.by)}
            self._to(end, "queued", reason="BLOCKS", others=others, who=who)
            return
        seconds = min(end, self._marks.end) - self._cursor
        reason, first = last.wait.reason, last.wait.request_id
        if reason == "SEAT":
            who = dict.fromkeys(who, seconds)
        elif reason != "BUDGET":
            who = {i: count for i, count in last.wait.holders if not self._is_own(i)}
        behind = {} if self._is_own(first) else {first: seconds}
        self._to(
            end,
            "queued",
            reason=reason,
            is_behind=bool(behind),
            others=others,
            who=who,
            behind=behind,
        )


def _is_next_beam(before: _Own, own: _Own | None) -> bool:
    """Return True if a step starts another request of a beam search, which has queued again."""
    if own is None or own.part.num_known_tokens is None:
        return False
    return own.part.request_id != before.part.request_id


@dataclass(slots=True)
class _Waits:
    """What a request waits for during a life.

    Attributes:
        begin: begin of the life.
        is_running: True if it ran at the begin.
        until: begin of the scheduling of its next step.
        added: time at which the engine received it.
        preempted: time of its preemption.
        preempted_by: request that needed its blocks.
        held: times in which it was held, with the cause.
    """

    begin: float
    is_running: bool
    until: float
    added: float = -math.inf
    preempted: float = math.inf
    preempted_by: str | None = None
    held: list[tuple[float, float, str]] = field(default_factory=list)

    def note(self, event: StepEvent, followed: str | None, is_one: bool) -> None:
        """Take in an event of the request."""
        mine = is_one or followed is None or event.request_id == followed
        if event.kind == "ADDED":
            same = followed is None or number_of(event.request_id) == number_of(followed)
            if same and self.added == -math.inf:
                self.added = event.time
        elif not mine:
            return
        elif event.kind in _HELD:
            self._release(event.time)
            self.held.append((event.time, math.inf, _HELD[event.kind]))
        elif event.kind == "READY":
            self._release(event.time)

    def _release(self, time: float) -> None:
        if self.held and self.held[-1][1] == math.inf:
            begin, _, cause = self.held[-1]
            self.held[-1] = begin, time, cause

    def cuts(self) -> list[float]:
        """Return the times at which something changes."""
        times = [self.added, self.preempted, self.until]
        return [*times, *(time for begin, end, _ in self.held for time in (begin, end))]

    def held_at(self, time: float) -> str | None:
        """Return the cause for which it is held."""
        return next((cause for begin, end, cause in self.held if begin <= time < end), None)

    def waits_at(self, time: float) -> bool:
        """Return True if it is in the queue."""
        return time < self.until and (not self.is_running or self._was_held(time))

    def _was_held(self, time: float) -> bool:
        return any(end <= time for _, end, _ in self.held)

    def since(self, time: float) -> float:
        """Return the time from which it was in the queue."""
        begin = self.begin if self.added == -math.inf else self.added
        return max([begin, *(end for _, end, _ in self.held if end <= time)])
