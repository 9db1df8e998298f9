"""Seconds that other settings would have saved for a past request: the past, simulated again.

The recorded steps tell the arrivals, prompts and answers of an engine's requests, and the time of
its steps. Requests are simulated with the settings as they are, and with one setting doubled. A
prompt's cached tokens are simulated as a prefix that all prompts share. Requests that had begun
before the records only occupy a seat, and their blocks are unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from octavo.bench.datasets import BenchRequest
from octavo.errors import OctavoError
from octavo.frontend.past import Past
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.observability.steps import StepRecord
from octavo.simulation.simulation import SimulatedEngine, simulate
from octavo.simulation.step_times import BatchReader, MeasuredStep, StepBatch, StepTimes

MOST_SECONDS = 1.0
"""Limit of the time for all simulations of a call."""
_MOST_TOKENS = 20_000
"""Most tokens of all answers, as each takes a part of a simulated step."""
_WORST_ERROR = 0.5
"""Relative error of the simulated past beyond which it says nothing about other settings."""


class _TooLongError(Exception):
    """The simulation takes too long."""


@dataclass
class _Request:
    arrival: float
    num_prompt: int
    num_known: int
    num_output: int = 0
    left: int = 0
    last: float = 0.0


def what_if(past: Past, settings: Sequence[str]) -> Mapping[str, float]:
    """Return the seconds that twice the value of each setting would have saved.

    Args:
        past: the engine's steps, and the request.
        settings: names among max_num_seqs, max_num_batched_tokens and kv_cache_memory_bytes.

    Returns:
        Seconds by setting; {} if the past cannot be simulated well enough, or not in time.
    """
    try:
        return _what_if(past, settings)
    except (_TooLongError, OctavoError):
        return {}


def _what_if(past: Past, settings: Sequence[str]) -> dict[str, float]:
    config = past.config
    groups = make_kv_cache_groups(past.spec.caches)
    drafts = any(part.num_drafts for step in past.steps for part in step.parts)
    if drafts or any(group.has_states for group in groups):
        return {}
    requests = _requests(past.steps)
    mine = requests.get(past.core_id)
    tokens = sum(request.num_output for request in requests.values())
    if mine is None or not mine.num_output or tokens > _MOST_TOKENS:
        return {}
    times = StepTimes.of_steps(
        _measured(past.steps),
        model=config.model.model,
        cpu="",
        num_blocks=past.num_blocks,
        max_model_len=past.max_model_len,
    )
    times.spread = []
    parallel = msgspec.structs.replace(config.parallel, data_parallel_size=1)
    config = msgspec.structs.replace(config, parallel=parallel)
    engine = SimulatedEngine(
        config,
        KVCacheConfig(past.num_blocks, config.cache.block_size, groups),
        past.max_model_len,
        past.max_num_batched_tokens,
        times,
    )
    run = _Runs(requests, past.core_id, time.perf_counter() + MOST_SECONDS)
    usual, real = run(engine), mine.last - mine.arrival
    if abs(usual - real) > _WORST_ERROR * real:
        return {}
    return {name: max(0.0, usual - run(_DOUBLED[name](engine))) for name in settings}


def _more_seats(engine: SimulatedEngine) -> SimulatedEngine:
    scheduler = engine.config.scheduler
    more = msgspec.structs.replace(scheduler, max_num_seqs=2 * scheduler.max_num_seqs)
    return replace(engine, config=msgspec.structs.replace(engine.config, scheduler=more))


def _more_budget(engine: SimulatedEngine) -> SimulatedEngine:
    return replace(engine, max_num_batched_tokens=2 * engine.max_num_batched_tokens)


def _more_blocks(engine: SimulatedEngine) -> SimulatedEngine:
    cache = engine.kv_cache
    more = KVCacheConfig(2 * cache.num_blocks, cache.block_size, cache.groups)
    return replace(engine, kv_cache=more)


_DOUBLED: Mapping[str, Callable[[SimulatedEngine], SimulatedEngine]] = {
    "max_num_seqs": _more_seats,
    "max_num_batched_tokens": _more_budget,
    "kv_cache_memory_bytes": _more_blocks,
}


class _Runs:
    """Simulations of the same requests.

    Args:
        requests: the requests by id.
        core_id: the one in question.
        end: second of `time.perf_counter` at which they must have ended.
    """

    def __init__(self, requests: Mapping[str, _Request], core_id: str, end: float) -> None:
        self._end = end
        first = min(request.arrival for request in requests.values())
        ordered = sorted(requests.items(), key=lambda item: item[1].arrival)
        self._place = [name for name, _ in ordered].index(core_id)
        self._arrivals = [request.arrival - first for _, request in ordered]
        self._requests = [
            BenchRequest(
                [0] * request.num_known + [i + 1] * (request.num_prompt - request.num_known),
                None,
                max(1, request.num_output),
            )
            for i, (_, request) in enumerate(ordered)
        ]

    def __call__(self, engine: SimulatedEngine) -> float:
        """Return the seconds from the arrival of the request to its last token."""
        result = simulate(engine, self._requests, self._arrivals, on_step=self._check)
        times = result.records[self._place].token_times
        if not times:
            raise _TooLongError
        return times[-1] - self._arrivals[self._place]

    def _check(self) -> None:
        if time.perf_counter() > self._end:
            raise _TooLongError


def _requests(steps: Sequence[StepRecord]) -> dict[str, _Request]:
    """Return the requests of steps by id."""
    added: dict[str, float] = {}
    found: dict[str, _Request] = {}
    for step in steps:
        for event in step.events:
            if event.kind == "ADDED":
                added.setdefault(event.request_id, event.time)
        for part in step.parts:
            request = found.get(part.request_id)
            if request is None:
                known = part.num_known_tokens
                parent = part.request_id.partition("_")[2]
                arrival = added.get(part.request_id, added.get(parent, step.schedule_begun))
                request = _Request(arrival, part.num_prompt_tokens or 1, known or 0)
                request.left = request.num_prompt - request.num_known if known is not None else 0
                found[part.request_id] = request
            elif part.num_known_tokens is not None:  # it starts again with its tokens so far
                request.left = part.num_prompt_tokens - part.num_known_tokens
            request.left -= part.num_tokens
            if request.left <= 0:
                request.num_output += 1
                request.last = step.computed
    return found


def _measured(steps: Sequence[StepRecord]) -> list[MeasuredStep]:
    """Return the steps with known batches and times."""
    reader, found = BatchReader(), list[MeasuredStep]()
    for step in steps:
        batch, known = StepBatch(), not step.failed
        for part in step.parts:
            if part.num_known_tokens is not None:
                reader.start(part.request_id, part.num_known_tokens, part.num_prompt_tokens)
            if part.request_id in reader:
                reader.add(batch, part.request_id, part.num_tokens)
            else:
                known = False
        if known and step.parts:
            found.append(MeasuredStep(batch, len(step.parts), step.computed - step.begun, None))
    return found
