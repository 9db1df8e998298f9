"""Probe of the real engine for `octavo simulate`: its step times, and how it serves requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from octavo.bench import results
from octavo.bench.datasets import BenchRequest
from octavo.bench.metrics import RequestRecord
from octavo.bench.offline import record_of
from octavo.config import EngineConfig
from octavo.errors import BenchError
from octavo.executor.base import Executor, StepHandle
from octavo.fleet.core_client import InprocClient
from octavo.frontend.llm_engine import LLMEngine
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo.plan.memory import MemoryBudget
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.simulation.step_times import (
    BatchReader,
    MeasuredStep,
    StepTimes,
    fit_line,
)
from octavo.system import clock
from octavo.system.device import cpu_model

# Rounds of the probe; each sends groups of these numbers of concurrent requests.
_ROUNDS = 3
_CONCURRENCIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_OUTPUT_LEN = 24
_PROBE_SECONDS = 30.0


class EngineProbe:
    """Engine in this process, for measurements.

    Args:
        config: the settings.

    Raises:
        ConfigError, ModelError: the settings or the model are unusable.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine = LLMEngine(config)
        client = self._engine.client
        assert isinstance(client, InprocClient)
        self._core = client.core
        self._arrivals: list[tuple[float, float]] = []
        """Prompt tokens of arrived requests, and the seconds of adding each request."""

    def __enter__(self) -> EngineProbe:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.shutdown()

    def measure_steps(self, quiet: bool = False) -> StepTimes:
        """Run requests of many sizes and concurrencies, and fit the times of their steps.

        Args:
            quiet: show no progress.

        Raises:
            BenchError: a request failed, or there are too few steps.
        """
        plan, watched = self._engine.memory_plan, _WatchedExecutor(self._core.executor)
        rng = np.random.default_rng(0)
        self._core.executor = watched
        most = min(self._config.scheduler.max_num_seqs, int(8 * plan.max_concurrency))
        counts = [count for count in _CONCURRENCIES if count <= most]
        began = time.monotonic()
        try:
            self._serve_all([self._make_request(rng) for _ in range(2)])  # warms up
            watched.forget()
            self._arrivals.clear()
            total = _ROUNDS * sum(counts)
            with results.progress(total=total, desc="Measured requests", disable=quiet) as bar:
                for _ in range(_ROUNDS):
                    for count in counts:
                        self._serve_all([self._make_request(rng) for _ in range(count)])
                        bar.update(count)
                    if time.monotonic() - began > _PROBE_SECONDS:
                        break
        finally:
            self._core.executor = watched.executor
        found = StepTimes.of_steps(
            watched.steps,
            model=self._config.model.model,
            cpu=cpu_model(),
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
        )
        found.arrival_seconds, found.arrival_token_seconds = fit_line(self._arrivals)
        return found

    def serve(
        self,
        requests: Sequence[BenchRequest],
        arrivals: Sequence[float],
        on_end: Callable[[], object] = lambda: None,
    ) -> list[RequestRecord]:
        """Serve requests, each at its time; see `simulate`. The prefix cache is emptied first.

        Only the times of each request's first and last token are known.
        """
        engine = self._engine
        engine.reset_prefix_cache()
        order = sorted(range(len(requests)), key=arrivals.__getitem__)
        records: dict[str, RequestRecord] = {}
        place, origin = 0, time.monotonic()
        while place < len(order) or engine.has_unfinished_requests():
            while place < len(order) and origin + arrivals[order[place]] <= time.monotonic():
                request, began = requests[order[place]], time.perf_counter()
                engine.add_request(
                    str(order[place]),
                    {"prompt_token_ids": request.prompt_token_ids},
                    _params(request),
                    arrival_time=clock.from_monotonic(origin + arrivals[order[place]]),
                )
                num_tokens = len(request.prompt_token_ids or ())
                self._arrivals.append((num_tokens, time.perf_counter() - began))
                place += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, origin + arrivals[order[place]] - time.monotonic()))
                continue
            for output in engine.step():
                records[output.request_id] = record_of(output, origin)
                on_end()
        return [records[str(index)] for index in range(len(requests))]

    def _make_request(self, rng: np.random.Generator) -> BenchRequest:
        """Make a request of random size, with a log-uniform distribution."""
        longest = max(2, self._engine.memory_plan.max_model_len - _OUTPUT_LEN - 1)
        size = int(np.exp(rng.uniform(0, np.log(longest))))
        ids = rng.integers(self._engine.spec.vocab_size, size=size).tolist()
        return BenchRequest(ids, None, _OUTPUT_LEN)

    def _serve_all(self, requests: Sequence[BenchRequest]) -> None:
        for record in self.serve(requests, [0.0] * len(requests)):
            if record.error is not None:
                raise BenchError(f"A request of the probe failed: {record.error}")


class _WatchedExecutor(Executor):
    """Wrapper of an executor that measures each step.

    Attributes:
        executor: the inner executor.
        steps: the measured steps.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.max_in_flight = executor.max_in_flight
        self.steps: list[MeasuredStep] = []
        self._reader = BatchReader()
        self._last_end = 0.0
        self._last_taken: float | None = None
        """Time of the last read result; None: nothing has run since."""

    def forget(self) -> None:
        """Drop the measured steps."""
        self.steps = []

    def execute(self, work: SchedulerOutput) -> StepHandle:
        batch, _ = self._reader.read(work)
        step = MeasuredStep(batch, len(work.scheduled_reqs), 0.0, None)
        begin = time.perf_counter()
        handle = self.executor.execute(work)
        return _WatchedStep(self, handle, step, begin) if work.scheduled_reqs else handle

    def note(self, step: MeasuredStep, begin: float) -> None:
        """Record a step that has just ended."""
        end = time.perf_counter()
        step.seconds, self._last_end = end - max(begin, self._last_end), end
        self.steps.append(step)

    def take(
        self, step: MeasuredStep, result: Future[ModelRunnerOutput], timeout: float | None
    ) -> ModelRunnerOutput:
        """Wait for a step's result."""
        if self._last_taken is not None:
            step.host_seconds = time.perf_counter() - self._last_taken
        try:
            return result.result(timeout)
        finally:
            self._last_taken = time.perf_counter()

    def measure_memory(self) -> MemoryBudget:
        return self.executor.measure_memory()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        self.executor.initialize_kv_cache(kv_cache)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self.executor.pids

    def register_failure_callback(self, callback: Callable[[Exception], object]) -> None:
        self.executor.register_failure_callback(callback)

    def shutdown(self) -> None:
        self.executor.shutdown()


class _WatchedStep:
    """Implementation of `StepHandle`."""

    def __init__(
        self, executor: _WatchedExecutor, handle: StepHandle, step: MeasuredStep, begin: float
    ) -> None:
        self._executor, self._handle = executor, handle
        self._step, self._begin = step, begin

    def drafts(self) -> dict[str, list[int]]:
        return self._handle.drafts()

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        result = self._handle.sample(grammar)
        result.add_done_callback(lambda _: self._executor.note(self._step, self._begin))
        return _WatchedResult(self._executor, self._step, result)


class _WatchedResult(Future[ModelRunnerOutput]):
    """Wrapper of a future that measures when its result is read."""

    def __init__(
        self, executor: _WatchedExecutor, step: MeasuredStep, result: Future[ModelRunnerOutput]
    ) -> None:
        super().__init__()
        self._executor, self._step, self._inner = executor, step, result

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the inner future's result."""
        return self._executor.take(self._step, self._inner, timeout)


def _params(request: BenchRequest) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=request.max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
