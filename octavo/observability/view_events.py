"""Events of the engine view, which the server streams and `octavo replay --view` writes.

A stream begins with `hello`. Then each `tick` has what is new, and each `requests` the answers that
the viewer may see; `history` has older steps. They never have text or tokens. A request has a
label: the number that the front end gave it. Only `requests` has ids, and only of the viewer's own
requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec

from octavo.observability.scheduler_stats import SchedulerStats
from octavo.observability.steps import StepPart, StepPreemption, StepRecord, StepWait

_CORE_ID = re.compile(r"(?:(\d+)_)?.*#([\d.]+)", re.DOTALL)
_ENCODER = msgspec.json.Encoder()


class Hello(msgspec.Struct, omit_defaults=True):
    """Settings of the server."""

    time: float
    """Seconds since 1970, as all times here."""
    version: str
    models: list[str]
    block_size: int
    max_num_batched_tokens: int
    """Budget of tokens of a step."""
    max_num_seqs: int
    """Most requests in a step."""
    local_engines: int = 1
    """Number of engines on the server's machine; the others run on nodes."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    front_ends: int = 1
    """Number of front ends; a viewer sees the requests of one, and the steps of all engines."""
    all_requests: bool = True
    """False if the viewer sees only its own requests in detail."""
    recording: bool = False
    """True if the events were made from a recording."""


class ViewStep(msgspec.Struct, omit_defaults=True):
    """Finished step of an engine. Durations are in milliseconds."""

    engine: int
    number: int
    at: float
    """Begin of the computation, in ms after the `time` of the event."""
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    output: float = 0.0
    parts: msgspec.Raw | list[list[Any]] | None = None
    """List of [label, tokens], [label, tokens, drafts] or, in the first step after an arrival or a
    preemption, [label, tokens, drafts, 1]. None: the same as in the engine's step before."""
    wait: list[str] | None = None
    """Label of the first waiting request, and name of the `WaitReason`."""
    preempted: list[list[str | None]] | None = None
    """Labels of the preempted requests, and of those that needed their blocks."""
    failed: bool = False


class ViewStats(msgspec.Struct, omit_defaults=True):
    """State and counters of an engine; see `SchedulerStats`."""

    running: int = 0
    waiting: int = 0
    held: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    snapshots: int = 0
    expert_balance: list[float] = []
    """Mean load of the experts over the largest one, by layer."""

    @classmethod
    def of(cls, stats: SchedulerStats) -> ViewStats:
        """Return the shown part of the statistics."""
        return cls(
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            stats.num_held_reqs,
            stats.num_used_blocks,
            stats.num_total_blocks,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            stats.num_preemptions,
            stats.num_scheduled_tokens,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_snapshots,
            [round(balance, 2) for balance in stats.expert_balancedness],
        )


class ViewBlocks(msgspec.Struct, omit_defaults=True):
    """Map of an engine's KV cache, or its changes; see `BlockMap`."""

    num_blocks: int
    blocks_per_cell: int
    runs: list[int]
    """Triples: first cell, number of cells, value of all of them."""
    states: list[int] = []
    """The same for recurrent states."""
    num_cells: int = 0
    """Number of cells of a whole map; 0: changes."""
    num_states: int = 0
    owners: dict[str, str] = {}
    """Labels of new owners, by their number in the cells."""


class ViewDeath(msgspec.Struct):
    """Death of an engine, and its revival."""

    time: float
    """Time of the revival."""
    seconds: float
    """Seconds since the detection of the death."""
    engine: int
    reason: str


class Tick(msgspec.Struct, omit_defaults=True):
    """News since the last tick; a viewer's first tick has the whole state."""

    time: float
    first: int = 0
    """Number of the first step, counted over all engines since the start of the server."""
    steps: list[ViewStep] = []
    stats: dict[str, ViewStats] = {}
    """By number of the engine, as the following."""
    blocks: dict[str, ViewBlocks] = {}
    experts: dict[str, list[tuple[int, list[int]]]] = {}
    """Layers with the tokens of each of their experts since the start."""
    engines: list[int] | None = None
    """Numbers of the engines."""
    health: str | None = None
    """State of the engines, such as "ok" or "starting the engine again"."""
    deaths: list[ViewDeath] = []
    servers: dict[str, str] | None = None
    """Name of each engine's server, in the view of a router."""


class ViewRequest(msgspec.Struct, array_like=True):
    """Unfinished answer that the viewer may see."""

    label: str
    engine: int | None
    state: str
    """waiting, prompt, answer or preempted."""
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens of the prompt that were computed or found in the cache."""
    num_output_tokens: int
    num_cached_tokens: int
    arrival_time: float


class Requests(msgspec.Struct, omit_defaults=True):
    """Unfinished answers of the front end; the oldest ones, if there are very many."""

    rows: list[ViewRequest]
    others: msgspec.Raw | list[tuple[str, int | None, str]] | None = None
    """List of [label, engine, state] of all keys' answers, if the viewer does not see all."""
    more: int = 0
    """Number of further answers of all keys."""


class _Step(msgspec.Struct, array_like=True):
    """`StepRecord` with encoded parts and events."""

    number: int
    schedule_begun: float
    scheduled: float
    begun: float
    computed: float
    processed: float
    parts: msgspec.Raw
    wait: StepWait | None = None
    preemptions: list[StepPreemption] = []
    failed: bool = False
    sample_seconds: float = 0.0
    events: msgspec.Raw = msgspec.Raw(b"\x90")


assert _Step.__struct_fields__ == StepRecord.__struct_fields__
_STEP = msgspec.msgpack.Decoder(_Step)
_PARTS = msgspec.msgpack.Decoder(list[StepPart])


class StepViewer:
    """Converter of records of steps to `ViewStep`.

    Most steps have the same parts as the step before. These are decoded and sent once.

    Args:
        note: called for each step with the engine's number, the parts that compute a prompt, and
            the preemptions.
    """

    def __init__(
        self,
        note: Callable[[int, list[StepPart], list[StepPreemption]], None] = lambda *args: None,
    ) -> None:
        self._note = note
        self._last: dict[int, tuple[bytes, list[StepPart], msgspec.Raw]] = {}
        """Encoded parts of the last step of each engine, those of prompts, and the shown parts."""

    def view(self, records: Iterable[tuple[int, bytes]], time: float) -> list[ViewStep]:
        """Return the steps of an event.

        Args:
            records: pairs of an engine's number and a `StepRecord` as msgpack.
            time: the time of the event.
        """
        steps: list[ViewStep] = []
        shown: set[int] = set()
        for engine, data in records:
            record = _STEP.decode(data)
            raw = bytes(record.parts)
            last = self._last.get(engine)
            if last is None or last[0] != raw:
                parts = _PARTS.decode(raw)
                prompts = [part for part in parts if _computes_prompt(part)]
                last = self._last[engine] = raw, prompts, show_parts(parts)
                shown.discard(engine)
            step = ViewStep(
                engine,
                record.number,
                _ms(record.begun - time),
                _ms(record.scheduled - record.schedule_begun),
                _ms(record.computed - record.begun - record.sample_seconds),
                _ms(record.sample_seconds),
                _ms(record.processed - record.computed),
                None if engine in shown else last[2],
                failed=record.failed,
            )
            shown.add(engine)
            if record.wait is not None:
                step.wait = [label_of(record.wait.request_id), record.wait.reason]
            if record.preemptions:
                step.preempted = [
                    [label_of(p.request_id), None if p.by is None else label_of(p.by)]
                    for p in record.preemptions
                ]
            steps.append(step)
            self._note(engine, last[1], record.preemptions)
        return steps


def _computes_prompt(part: StepPart) -> bool:
    """Return True if a part is not one token with its drafts."""
    return part.num_known_tokens is not None or part.num_tokens != 1 + part.num_drafts


@lru_cache(maxsize=2**14)
def label_of(core_id: str) -> str:
    """Return the label of an answer: the number of its request in the front end.

    The second answer to a prompt has a label such as 17-1. In front end 2 it is 2.17-1.
    """
    found = _CORE_ID.fullmatch(core_id)
    assert found is not None, "no id of the front end"
    return found[2] if found[1] is None else f"{found[2]}-{found[1]}"


def show_parts(parts: Iterable[StepPart]) -> msgspec.Raw:
    """Return the `parts` of a `ViewStep`."""
    shown: list[list[Any]] = []
    for part in parts:
        entry: list[Any] = [label_of(part.request_id), part.num_tokens]
        if part.num_known_tokens is not None:
            entry += [part.num_drafts, 1]
        elif part.num_drafts:
            entry.append(part.num_drafts)
        shown.append(entry)
    return msgspec.Raw(_ENCODER.encode(shown))


def encode_event(name: str, event: msgspec.Struct) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(event))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
