"""Events of the engine view from a recording, for `octavo replay FILE --view OUT`.

The page opens the file. A recording has only the times at which a step was scheduled, begun and
computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from octavo.errors import ConfigError, OctavoError, reason_of
from octavo.frontend.output_processor import LiveAnswer
from octavo.frontend.step_log import EngineDeath, StepLog
from octavo.kv_cache.block_map import INTERVAL, BlockMap
from octavo.observability.recording import (
    Arrival,
    Died,
    End,
    Head,
    Outputs,
    Step,
    read_records,
    recording_files,
)
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.observability.steps import StepPart, StepRecord
from octavo.observability.view_events import Hello, encode_event
from octavo.server.view_picture import Picture

Event = tuple[float, Callable[[], None]]
_ENCODER = msgspec.msgpack.Encoder()


def write_view(path: Path, out: Path) -> int:
    """Write the events of a recording to a file, and return the number of its steps.

    Raises:
        ConfigError: `out` cannot be written.
        OctavoError: the recording cannot be read, has another format, or has no steps.
    """
    head, files = recording_files(path)
    engine = RecordedEngine(head)
    events = sorted(engine.read(files), key=lambda event: event[0])
    if not engine.num_steps:
        raise OctavoError(f"{path} has no steps to show; record for longer.")
    try:
        with out.open("wb") as file:
            file.writelines(_show(engine, events))
    except OSError as error:
        raise ConfigError(f"view={str(out)!r} cannot be written: {reason_of(error)}.") from None
    return engine.num_steps


def _show(engine: RecordedEngine, events: list[Event]) -> Iterator[bytes]:
    """Yield the events of the view."""
    begin = events[0][0]
    yield encode_event("hello", engine.hello(begin))
    picture, shown = Picture(engine), begin

    def tick(time: float) -> bytes:
        picture.show_maps(engine.take_maps())
        return picture.update([None], time).news(None)

    for time, happen in events:
        while time > shown + INTERVAL:
            # Quiet times are passed over.
            shown = max(shown + INTERVAL, time - INTERVAL)
            yield tick(shown)
        health = engine.health().reason
        happen()
        if engine.health().reason != health:  # a quick revival would hide a death
            shown = time
            yield tick(shown)
    yield tick(events[-1][0])


class RecordedEngine:
    """Engine of a recording, as `Picture` sees it: the state at the time of the last event.

    Args:
        head: first record.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self.config = SimpleNamespace(parallel=SimpleNamespace(first_engine=0))
        self.num_engines = 1
        self.step_log = StepLog(math.inf, 2**62)
        self.num_steps = self._most_tokens = 0
        self._answers: dict[str, LiveAnswer] = {}
        self._stats = SchedulerStats()
        self._reason = "ok"
        self._last_computed = 0.0
        self._map = b""
        """Packed map that was not shown yet."""
        self._pending: dict[int, Step] = {}
        """Steps whose end was not read yet, in order."""

    @property
    def engine_stats(self) -> Mapping[int, SchedulerStats]:
        """Statistics that follow from the records."""
        return {0: msgspec.structs.replace(self._stats)}

    def live_answers(self) -> Iterator[LiveAnswer]:
        """Yield the unfinished answers."""
        return iter(self._answers.values())

    def engine_of(self, core_id: str) -> int:
        """Return 0: there is one engine."""
        return 0

    def health(self) -> SimpleNamespace:
        """Return the state."""
        return SimpleNamespace(reason=self._reason)

    async def block_maps(self) -> dict[int, BlockMap]:
        """Return the same as `take_maps`."""
        return self.take_maps()

    def take_maps(self) -> dict[int, BlockMap]:
        """Return the newest map of the KV cache unless it was returned before."""
        packed, self._map = self._map, b""
        return {0: BlockMap.unpack(packed)} if packed else {}

    async def expert_counts(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Return {}: a recording has no loads of experts."""
        return {}

    def hello(self, time: float) -> Hello:
        """Return the settings, after `read`."""
        config: dict[str, Any] = self._head.config
        scheduler, model = config["scheduler"], config["model"]
        return Hello(
            time,
            self._head.build["octavo"],
            model["served_model_name"] or [model["model"]],
            config["cache"]["block_size"],
            scheduler["max_num_batched_tokens"] or self._most_tokens,
            scheduler["max_num_seqs"],
            recording=True,
        )

    def read(self, files: list[Path]) -> Iterator[Event]:
        """Yield all events with their times, not in order."""
        for file in files:
            for record in read_records(file):
                match record:
                    case Head() if record.num_blocks is not None:
                        self._stats.num_total_blocks = record.num_blocks - 1
                    case Arrival():
                        yield record.request.options.arrival_time, self._arrival(record)
                    case Outputs():
                        yield record.time, self._outputs(record)
                    case End():
                        yield record.time, self._end(record.request_id)
                    case Died():
                        yield record.time, self._death(record)
                    case Step():
                        yield from self._read_step(record)
        yield from self._end_steps()

    def _read_step(self, step: Step) -> Iterator[Event]:
        if step.number == 1:  # another engine
            yield from self._end_steps()
        if step.block_map:
            yield step.time, self._show_map(step.block_map)
        for ended in step.ended:
            if (of := self._pending.pop(ended.number, None)) is not None:
                yield self._step(of, ended.seconds)
        if step.requests:
            self._pending[step.number] = step

    def _end_steps(self) -> Iterator[Event]:
        """Yield the steps without a recorded end, which the engine may not have computed."""
        for step in self._pending.values():
            yield self._step(step, 0.0)
        self._pending = {}

    def _show_map(self, packed: bytes) -> Callable[[], None]:
        def happen() -> None:
            self._map = packed

        return happen

    def _step(self, step: Step, seconds: float) -> Event:
        begun = max(step.time, self._last_computed)
        end = self._last_computed = begun + seconds
        parts = []
        for r in step.requests:
            parts.append(StepPart(r.req_id, r.num_tokens, r.num_drafts, r.num_computed_tokens))
        record = StepRecord(step.number, step.time, step.time, begun, end, end, parts)
        self.num_steps += 1
        self._most_tokens = max(self._most_tokens, record.num_tokens)

        def happen() -> None:
            self.step_log.add(0, end, [msgspec.Raw(_ENCODER.encode(record))])
            stats = self._stats
            stats.num_running_reqs = len(parts)
            stats.num_waiting_reqs = max(0, len(self._answers) - len(parts))
            stats.num_scheduled_tokens += record.num_tokens
            for part in parts:
                stats.prefix_cache_hits += part.num_known_tokens or 0
            self._reason = "ok"

        return end, happen

    def _arrival(self, arrival: Arrival) -> Callable[[], None]:
        request = arrival.request
        size = arrival.num_prompt_tokens or len(request.prompt_token_ids)

        def happen() -> None:
            for core_id in request.child_ids:
                self._stats.prefix_cache_queries += size
                name, when = core_id.rpartition("#")[0], request.options.arrival_time
                self._answers[core_id] = LiveAnswer(core_id, name, None, size, 0, 0, when)

        return happen

    def _outputs(self, outputs: Outputs) -> Callable[[], None]:
        def happen() -> None:
            for output in outputs.outputs:
                if (answer := self._answers.get(output.request_id)) is not None:
                    cached = answer.num_cached_tokens or output.num_cached_tokens
                    self._answers[output.request_id] = answer._replace(
                        num_output_tokens=answer.num_output_tokens + len(output.new_token_ids),
                        num_cached_tokens=cached,
                    )

        return happen

    def _end(self, request_id: str) -> Callable[[], None]:
        def happen() -> None:
            self._answers.pop(request_id, None)
            if not self._answers:
                self._stats.num_running_reqs = self._stats.num_waiting_reqs = 0

        return happen

    def _death(self, died: Died) -> Callable[[], None]:
        def happen() -> None:
            self.step_log.deaths.append(EngineDeath(died.time, 0.0, 0, died.reason))
            self._reason = f"the engine has died: {died.reason}"

        return happen
