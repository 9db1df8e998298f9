"""`octavo replay`: run the requests of a recording again, and report differences."""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.checkpoints.identity import model_hash
from octavo.config import EngineConfig, config_fields
from octavo.engine.record import describe_build
from octavo.errors import ModelError, OctavoError, RequestError
from octavo.frontend.interrupts import late_interrupts
from octavo.frontend.llm_engine import LLMEngine
from octavo.messages import FinishReason, LogprobsLists
from octavo.models.hub import resolve_folders
from octavo.models.open_model import open_model
from octavo.observability.recording import (
    Arrival,
    Died,
    End,
    Head,
    Lost,
    Outputs,
    Record,
    Step,
    read_records,
    recording_files,
)
from octavo.sampling_params import RequestOutputKind
from octavo.system import clock
from octavo.text.tokenizer import Tokenizer

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
# Equivalent settings: one that is given replaces the recorded other.
_INSTEAD = {
    "kv_cache_memory_bytes": "num_gpu_blocks_override",
    "num_gpu_blocks_override": "kv_cache_memory_bytes",
}


@dataclass
class Answer:
    """One of the n answers of a request."""

    request_id: str
    """Request id of the core."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    prompt_logprobs: list[LogprobsLists] = field(default_factory=list)
    first_time: float | None = None
    last_time: float | None = None
    end: End | None = None
    """End of the answer; None: the recording ends before it."""
    error: str | None = None
    sure: int | None = None
    """Number of tokens before a gap of the records; None: the answer has no gap."""

    @property
    def complete(self) -> bool:
        """True if it ended by a stop or its length, and has no gap."""
        return self.end is not None and self.end.reason in _COMPLETE and self.sure is None

    def miss(self) -> None:
        """Record a gap, which may contain some of its tokens."""
        self.sure = len(self.token_ids)

    def close(self, end: End | None) -> None:
        """Record the end of the answer, or of the recording."""
        self.end = end
        if self.sure is not None and end is not None and end.num_tokens <= len(self.token_ids):
            self.sure = None  # the gap was of other answers
        if self.sure is not None:
            del self.token_ids[self.sure :]
        elif end is not None:
            del self.token_ids[end.num_tokens :]

    def tpot(self) -> float | None:
        """Return the seconds per token after the first one."""
        if self.first_time is None or self.last_time is None or len(self.token_ids) < 2:
            return None
        return (self.last_time - self.first_time) / (len(self.token_ids) - 1)


class RequestLog:
    """Requests and their answers, assembled from records.

    Args:
        records: records in order; None for unreadable ones.
    """

    def __init__(self, records: Iterable[Record | None] = ()) -> None:
        self.head: Head | None = None
        self.arrivals: dict[str, Arrival] = {}
        """Arrivals by the request's id, in order."""
        self.answers: dict[str, Answer] = {}
        """Answers by the core's id."""
        self._first_steps: dict[str, int] = {}
        """Number of steps before a core received a request, by its id."""
        self._whole: dict[str, Answer] = {}
        """Unfinished answers without a gap."""
        self._steps_before: dict[str, int] = {}
        """Number of steps that were recorded before a request's arrival."""
        self.num_steps = 0
        self.num_deaths = 0
        self.num_unreadable = 0
        self.num_lost = 0
        for record in records:
            if record is None:
                self._note_unreadable()
            else:
                self.add(record)
        for answer in self.answers.values():
            if answer.end is None:
                answer.close(None)

    def add(self, record: Record) -> None:
        """Process the next record."""
        match record:
            case Head():
                self.head = record
            case Arrival() if record.request.n != record.params.n:
                self._note_unreadable()
            case Arrival():
                self.arrivals[record.request.request_id] = record
                self._steps_before[record.request.request_id] = self.num_steps
                for request_id in record.request.child_ids:
                    self.answers[request_id] = self._whole[request_id] = Answer(request_id)
            case Outputs():
                self._add_outputs(record)
            case End():
                answer = self.answers.get(record.request_id)
                if answer is not None and answer.end is None:
                    answer.close(record)
                    self._whole.pop(record.request_id, None)
            case Step():
                for request_id in record.added:
                    self._first_steps.setdefault(request_id, self.num_steps)
                self.num_steps += 1
            case Died():
                self.num_deaths += 1
            case Lost():
                self.num_lost += record.count
                self._note_gap()

    def _note_unreadable(self) -> None:
        self.num_unreadable += 1
        self._note_gap()

    def _note_gap(self) -> None:
        for answer in self._whole.values():
            answer.miss()
        self._whole.clear()

    def _add_outputs(self, record: Outputs) -> None:
        for output in record.outputs:
            answer = self.answers.get(output.request_id)
            if answer is None or answer.end is not None:
                continue  # from before the recording, or after the answer's end
            answer.error = output.error or answer.error
            if output.new_prompt_logprobs is not None:
                answer.prompt_logprobs.append(output.new_prompt_logprobs)
            if not output.new_token_ids:
                continue
            answer.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                answer.logprobs.append(output.new_logprobs)
            if answer.first_time is None:
                answer.first_time = record.time
            answer.last_time = record.time

    def first_step(self, arrival: Arrival) -> int:
        """Return the number of steps before a core first received the request."""
        request_id = arrival.request.request_id
        return self._first_steps.get(request_id, self._steps_before[request_id])

    def ttfts(self) -> list[float]:
        """Return the seconds from each request's arrival to its first token."""
        firsts = (
            (arrival.request.options.arrival_time, self.answers[i].first_time)
            for arrival in self.arrivals.values()
            for i in arrival.request.child_ids[:1]
        )
        return [first - arrived for arrived, first in firsts if first is not None]

    def tpots(self) -> list[float]:
        """Return the seconds per token of each answer."""
        return [t for answer in self.answers.values() if (t := answer.tpot()) is not None]

    def seconds(self) -> float:
        """Return the seconds from the first arrival to the last token."""
        last = [a.last_time for a in self.answers.values() if a.last_time is not None]
        arrived = [a.request.options.arrival_time for a in self.arrivals.values()]
        return max(last) - min(arrived) if last and arrived else 0.0


@dataclass(frozen=True)
class Difference:
    """Difference between a recorded and a replayed answer."""

    request_id: str
    position: int | None
    """Position of the first different token; None: only the ends differ."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        where = "the end" if self.position is None else f"token {self.position}"
        return f"{self.request_id}: {where} was {self.recorded}, is {self.replayed}"


@dataclass
class Report:
    """Results of a replay."""

    recorded: RequestLog
    replayed: RequestLog
    differences: list[Difference] = field(default_factory=list)
    num_compared: int = 0
    """Number of compared answers."""
    num_tokens: int = 0
    """Number of their recorded tokens."""
    num_cut: int = 0
    """Number of them that are incomplete, and compared as far as possible."""
    num_logprobs: int = 0
    """Number of positions with compared logprobs."""
    num_other_logprobs: int = 0
    """Number of these positions with different bytes."""
    most_logprob_difference: float = 0.0
    """Largest difference of the tokens' own logprobs."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        recorded, replayed = self.recorded, self.replayed
        if recorded.num_unreadable or recorded.num_lost:
            yield (
                f"the recording has gaps: {recorded.num_unreadable} unreadable places, "
                f"{recorded.num_lost} records dropped"
            )
        left_out = len(recorded.answers) - self.num_compared
        yield (
            f"{len(recorded.arrivals)} requests, {self.num_compared} answers with "
            f"{self.num_tokens} tokens"
            + (f", {self.num_cut} of them cut off" if self.num_cut else "")
            + (f"; {left_out} without tokens are left out" if left_out else "")
            + (f"; the engine died {recorded.num_deaths} times" if recorded.num_deaths else "")
        )
        yield from map(str, self.differences)
        if self.num_logprobs:
            yield (
                f"logprobs of {self.num_logprobs} positions: {self.num_other_logprobs} differ, "
                f"a token's own by at most {self.most_logprob_difference:.3g}"
            )
        yield f"{'':12}{'recorded':>14}{'replayed':>14}"
        rows = (
            ("TTFT, ms", recorded.ttfts(), replayed.ttfts()),
            ("TPOT, ms", recorded.tpots(), replayed.tpots()),
        )
        for name, before, now in rows:
            for word, share in (("median", 0.5), ("p99", 0.99)):
                cells = (_milliseconds(values, share) for values in (before, now))
                yield f"{name + ' ' + word:16}" + "".join(f"{cell:>12}" for cell in cells)
        yield f"{'all, s':16}{recorded.seconds():12.2f}{replayed.seconds():12.2f}"
        yield f"{len(self.differences)} answers differ"


def load_recording(path: Path) -> RequestLog:
    """Read a recording: both of its files, if there is an older half.

    Raises:
        OctavoError: the recording cannot be read, has another format, or lacks prompts.
    """
    head, files = recording_files(path)
    if head.prompts == "hash":
        raise OctavoError(
            f"{path} was recorded with --record-prompts hash: the prompts are not in it, so it "
            "cannot be replayed. Record with --record-prompts full."
        )
    log = RequestLog(record for file in files for record in read_records(file))
    if not log.arrivals:
        raise OctavoError(f"{path} has no requests.")
    return log


def replay_config(head: Head, given: dict[str, Any]) -> EngineConfig:
    """Return the recorded settings, overridden by the given ones.

    Raises:
        ConfigError: the settings are inconsistent, or the recorded ones are those of another build.
        OctavoError: the recorded settings are damaged.
    """
    if not all(isinstance(section, dict) for section in head.config.values()):
        raise OctavoError("The settings in the recording are damaged.")
    known = {f.name: f for f in config_fields()}
    recorded = {
        name: value
        for section in head.config.values()
        for name, value in section.items()
        if name not in known or value != msgspec.to_builtins(known[name].default)
    }
    for name in given:
        recorded.pop(_INSTEAD.get(name, name), None)
    return EngineConfig.from_kwargs(**recorded | given)


def replay(
    recorded: RequestLog, config: EngineConfig, *, free: bool = False, other_model: bool = False
) -> Report:
    """Run the requests of a recording again, in this process.

    Args:
        recorded: see `load_recording`.
        config: the engine's settings.
        free: submit all requests at once, instead of before their recorded steps.
        other_model: True to allow another model than the recorded one.

    Raises:
        ModelError: the model is another one, or cannot be loaded.
        ConfigError, EngineDeadError: as for `LLMEngine`.
    """
    head = recorded.head
    assert head is not None
    if not other_model:
        path, tokenizer_path = resolve_folders(config)
        found = model_hash(open_model(config, path), tokenizer_path)
        if found != head.model:
            raise ModelError(
                f"{config.model.model!r} is another model than the recorded one: its description, "
                f"tokenizer or weights differ (hash {found[:12]}, recorded {head.model[:12]}). "
                "Name the recorded one with --model, or give --allow-other-model."
            )
    replayed = RequestLog()
    engine = LLMEngine(config, record=replayed.add)
    try:
        _run(engine, recorded, replayed, free)
        return compare(recorded, replayed, engine.tokenizer)
    finally:
        engine.shutdown()


def _run(engine: LLMEngine, recorded: RequestLog, replayed: RequestLog, free: bool) -> None:
    """Submit each request before its step, and run until all recorded tokens are replayed."""
    step = 0
    wanted = [
        (recorded.first_step(arrival), arrival)
        for arrival in recorded.arrivals.values()
        if any(_has_something(recorded.answers[c]) for c in arrival.request.child_ids)
    ]
    waiting = deque(sorted(wanted, key=lambda pair: pair[0]))
    live: dict[str, Arrival] = {}
    while waiting or live:
        if waiting and not live:  # nothing happens until it arrives
            step = max(step, waiting[0][0])
        with late_interrupts():
            while waiting and (free or waiting[0][0] <= step):
                _, arrival = waiting.popleft()
                if _hand_in(engine, arrival, replayed):
                    live[arrival.request.request_id] = arrival
            engine.advance()
            step += 1
            for request_id, arrival in list(live.items()):
                if _has_all(arrival, recorded, replayed):
                    engine.end([request_id])
                    del live[request_id]


def _hand_in(engine: LLMEngine, arrival: Arrival, replayed: RequestLog) -> bool:
    """Submit a request; return False, with errors as its answers, if the engine rejects it."""
    params = msgspec.structs.replace(arrival.params, output_kind=RequestOutputKind.FINAL_ONLY)
    try:
        # No deadlines: the recorded ones have passed.
        request = engine.input_processor.renew(arrival.request, params, clock.now())
        engine.start(request, params, None)
    except RequestError as error:
        replayed.add(arrival)
        for request_id in arrival.request.child_ids:
            replayed.answers[request_id].error = str(error)
            replayed.add(End(clock.now(), request_id, FinishReason.ERROR, None, 0))
        return False
    return True


def _has_something(answer: Answer) -> bool:
    """Return True if an answer can be compared."""
    return answer.complete or bool(answer.token_ids)


def _has_all(arrival: Arrival, recorded: RequestLog, replayed: RequestLog) -> bool:
    """Return True if each answer has ended, or is as long as an incomplete recorded one."""
    for request_id in arrival.request.child_ids:
        before, now = recorded.answers[request_id], replayed.answers[request_id]
        enough = not before.complete and len(now.token_ids) >= len(before.token_ids)
        if now.end is None and not enough:
            return False
    return True


def compare(recorded: RequestLog, replayed: RequestLog, tokenizer: Tokenizer | None) -> Report:
    """Compare the answers of a replay with the recorded ones.

    Args:
        recorded: the recording.
        replayed: answers to the same requests.
        tokenizer: converts tokens to text; None: they are shown as numbers.
    """
    report = Report(recorded, replayed)
    for request_id, before in recorded.answers.items():
        if not _has_something(before):
            continue
        now = replayed.answers[request_id]
        report.num_compared += 1
        report.num_tokens += len(before.token_ids)
        report.num_cut += not before.complete
        position = _first_difference(before, now)
        if position is not None:
            texts = (_token(answer, position, tokenizer) for answer in (before, now))
            report.differences.append(Difference(request_id, position, *texts))
        elif before.complete and _end_of(before) != _end_of(now):
            ends = (" ".join(map(str, _end_of(answer))) for answer in (before, now))
            report.differences.append(Difference(request_id, None, *ends))
        # After the first different token the contexts differ, too.
        same = len(before.token_ids) if position is None else position
        _compare_logprobs(report, before.logprobs, now.logprobs, same)
        if before.complete:
            _compare_logprobs(report, before.prompt_logprobs, now.prompt_logprobs, None)
    return report


def _first_difference(before: Answer, now: Answer) -> int | None:
    """Return the first different position; a replay may be longer than an incomplete recording."""
    for i, (a, b) in enumerate(zip(before.token_ids, now.token_ids, strict=False)):
        if a != b:
            return i
    a, b = len(before.token_ids), len(now.token_ids)
    return min(a, b) if b < a or (before.complete and b > a) else None


def _end_of(answer: Answer) -> tuple[str, int | str | None]:
    return (
        ("none", None) if answer.end is None else (str(answer.end.reason), answer.end.stop_reason)
    )


def _token(answer: Answer, position: int, tokenizer: Tokenizer | None) -> str:
    if position >= len(answer.token_ids):
        return "not there" + (f" ({answer.error})" if answer.error else "")
    token = answer.token_ids[position]
    return str(token) if tokenizer is None else f"{token} ({tokenizer.token_text(token)!r})"


def _compare_logprobs(
    report: Report, before: list[LogprobsLists], now: list[LogprobsLists], most: int | None
) -> None:
    a, b = LogprobsLists.join(before), LogprobsLists.join(now)
    count = min(a.num_rows, b.num_rows)
    if most is not None:
        count = min(count, most)
    report.num_logprobs += count
    for i in range(count):
        x, y = a.select(i, i + 1), b.select(i, i + 1)
        if x != y:
            report.num_other_logprobs += 1
            difference = abs(array("f", x.logprobs)[0] - array("f", y.logprobs)[0])
            report.most_logprob_difference = max(report.most_logprob_difference, difference)


def _milliseconds(values: list[float], share: float) -> str:
    if not values:
        return "-"
    found = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values
    return f"{1000 * found[min(len(found), round(share * 100)) - 1]:.1f}"


def run_replay(path: str, given: dict[str, Any], *, free: bool, allow_other_model: bool) -> int:
    """Run the command: replay and print a report.

    Args:
        path: the recording.
        given: settings that override the recorded ones.
        free: see `replay`.
        allow_other_model: see `replay`.

    Returns:
        1 if any answer differs, otherwise 0.

    Raises:
        OctavoError: see `load_recording` and `replay`.
    """
    recorded = load_recording(Path(path))
    assert recorded.head is not None
    build = describe_build()
    for name, value in recorded.head.build.items():
        if value != build.get(name):
            print(f"{name}: recorded {value}, here {build.get(name)}")
    config = replay_config(recorded.head, given)
    report = replay(recorded, config, free=free, other_model=allow_other_model)
    print("\n".join(report.lines()))
    return 1 if report.differences else 0
