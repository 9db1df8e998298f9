"""Simulated engine: the real one, except for the clock and the model.

Scheduler, block pool, engine core and front-end records are those of every engine. All tokens are
0, and the time of a step is that of `StepTimes`. Idle time costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from octavo.bench.datasets import BenchRequest
from octavo.bench.metrics import RequestRecord
from octavo.bench.timeline import Timeline
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.executor.base import Executor
from octavo.fleet.routing import Router
from octavo.frontend.output_processor import OutputProcessor
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreRequest,
    GrammarOutput,
    ModelRunnerOutput,
    RequestOptions,
    SchedulerOutput,
)
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.plan.memory import MemoryBudget
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.simulation.step_times import BatchReader, StepDraws, StepTimes
from octavo.system import clock

_PARAMS = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


@dataclass(frozen=True)
class SimulatedEngine:
    """Properties of an engine.

    Attributes:
        config: the settings.
        kv_cache: shape of the KV cache.
        max_model_len: maximum tokens of a request.
        max_num_batched_tokens: token budget of a step.
        step_times: times of its steps.
    """

    config: EngineConfig
    kv_cache: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int
    step_times: StepTimes


@dataclass
class SimulatedRun:
    """Result of simulated requests.

    Attributes:
        records: records in the order of the requests.
        duration: seconds of virtual time.
        stats: final sum of the schedulers' statistics.
        kv_usage_max: maximum share of KV blocks in use after a step.
        timeline: load of the first engine.
    """

    records: list[RequestRecord]
    duration: float
    stats: SchedulerStats
    kv_usage_max: float
    timeline: Timeline


def simulate(
    engine: SimulatedEngine,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    on_end: Callable[[], object] = lambda: None,
    router: Router | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> SimulatedRun:
    """Serve requests in virtual time.

    Args:
        engine: the engine; with `data_parallel_size`, the properties of each of that number of
            engines.
        requests: each with its prompt's tokens, within the context.
        arrivals: arrival of each, in seconds since the start.
        on_end: called when a request has ended.
        router: assigns requests to engines; default: as in a server.
        on_step: called before each step.
    """
    config = engine.config
    count = config.parallel.data_parallel_size
    if router is None:
        caching = config.cache.enable_prefix_caching
        router = Router(config.cache.block_size, count, enable_prefix_caching=caching)
    records = [
        RequestRecord(len(request.token_ids), 0, at, at)
        for request, at in zip(requests, arrivals, strict=True)
    ]
    replicas = [_Replica(engine, records, router, on_end, on_step) for _ in range(count)]
    for index in sorted(range(len(requests)), key=arrivals.__getitem__):
        for replica in replicas:
            replica.run(arrivals[index])
        request = _core_request(str(index), requests[index], arrivals[index])
        replicas[router.place(request, range(count))].add(request)
    for replica in replicas:
        replica.run(math.inf)
    return SimulatedRun(
        records,
        max(replica.clock.seconds for replica in replicas),
        SchedulerStats.join([replica.core.stats() for replica in replicas]),
        max(replica.kv_usage_max for replica in replicas),
        replicas[0].timeline,
    )


class _Replica:
    """One of the engines."""

    def __init__(
        self,
        engine: SimulatedEngine,
        records: list[RequestRecord],
        router: Router,
        on_end: Callable[[], object],
        on_step: Callable[[], object],
    ) -> None:
        self.clock, self._times = VirtualClock(), engine.step_times
        self.core = EngineCore(
            Scheduler(
                engine.config.scheduler,
                engine.kv_cache,
                max_model_len=engine.max_model_len,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                enable_caching=engine.config.cache.enable_prefix_caching,
                clock=self.clock.now,
            ),
            ModelledExecutor(self._times, self.clock, engine.config.scheduler.async_scheduling),
            clock=self.clock.now,
        )
        self.timeline, self.kv_usage_max = Timeline(), 0.0
        self._processor = OutputProcessor(None)
        self._records, self._router, self._on_end = records, router, on_end
        self._on_step = on_step

    def add(self, request: EngineCoreRequest) -> None:
        """Add a request that arrives now, or arrived during the last step."""
        self._processor.add_request(request, _PARAMS)
        self.core.add_request(request)
        self.clock.seconds += self._times.arrival_seconds
        self.clock.seconds += self._times.arrival_token_seconds * len(request.prompt_token_ids)

    def run(self, until: float) -> None:
        """Run all steps that begin before a time; skip idle time."""
        while self.clock.seconds < until and self.core.has_work():
            self._step()
        if until < math.inf:
            self.clock.seconds = max(self.clock.seconds, until)

    def _step(self) -> None:
        self._on_step()
        self.clock.seconds += self._times.host_seconds
        self.clock.seconds += self._times.host_request_seconds * len(self.core.scheduler.running)
        outputs = self.core.step()
        now, stats, records = self.clock.seconds, outputs.stats, self._records
        assert stats is not None
        for output in outputs.outputs:
            if output.new_token_ids:
                records[int(output.request_id)].token_times.append(now)
                self._router.note_token(output.request_id)
        processed = self._processor.process_outputs(outputs.outputs, outputs.timestamp)
        for done in processed.request_outputs:
            record = records[int(done.request_id)]
            record.num_output_tokens = len(done.outputs[0].token_ids)
            record.num_cached_tokens = done.num_cached_tokens
            self._end(done.request_id)
        for request_id, error in processed.errors.items():
            records[int(request_id)].error = str(error)
            self._end(request_id)
        self.timeline.note(now, stats)
        self.kv_usage_max = max(self.kv_usage_max, stats.kv_cache_usage)

    def _end(self, request_id: str) -> None:
        self._router.remove([request_id])
        self._on_end()


class VirtualClock:
    """Clock that is set explicitly.

    Attributes:
        seconds: seconds since the start.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the time as in messages: 0 of this clock is 0 of `time.monotonic`."""
        return clock.from_monotonic(self.seconds)


class ModellessExecutor(Executor):
    """Base of executors that compute no model."""

    def measure_memory(self) -> MemoryBudget:
        """Raise NotImplementedError: there is no model."""
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Do nothing: there is no KV cache."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Return []: there are no workers."""
        return []

    def shutdown(self) -> None:
        """Implement `Executor`."""


class ModelledExecutor(ModellessExecutor):
    """Executor with modelled step times, one step after the other.

    Args:
        step_times: times of the steps.
        virtual: set to a step's end when its result is read.
        async_scheduling: True if the next step is submitted meanwhile.
    """

    def __init__(
        self, step_times: StepTimes, virtual: VirtualClock, async_scheduling: bool
    ) -> None:
        self.max_in_flight = 2 if async_scheduling else 1
        self._predict, self._draw = step_times.make_predictor(), StepDraws(step_times.spread)
        self._clock = virtual
        self._reader = BatchReader()
        self._free_at = 0.0

    def execute(self, work: SchedulerOutput) -> ModelledStep:
        """Implement `Executor`."""
        batch, sampled = self._reader.read(work)
        seconds = self._draw(self._predict(batch)) if work.scheduled_reqs else 0.0
        self._free_at = max(self._free_at, self._clock.seconds) + seconds
        output = ModelRunnerOutput(
            [scheduled.req_id for scheduled in work.scheduled_reqs],
            [[0] if gets_token else [] for gets_token in sampled],
        )
        return ModelledStep(self._clock, self._free_at, output)


class ModelledStep(Future[ModelRunnerOutput]):
    """Implementation of `StepHandle` and its own result, which sets the clock to the step's end."""

    def __init__(self, virtual: VirtualClock, end: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._clock, self._end, self._output = virtual, end, output

    def drafts(self) -> dict[str, list[int]]:
        """Implement `StepHandle`."""
        return {}

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        """Implement `StepHandle`."""
        return self

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Set the clock to the step's end; return the result."""
        self._clock.seconds = max(self._clock.seconds, self._end)
        return self._output


def _core_request(request_id: str, request: BenchRequest, at: float) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        request.token_ids,
        CoreSamplingParams(temperature=0.0, max_tokens=request.max_tokens),
        RequestOptions(clock.from_monotonic(at)),
    )
