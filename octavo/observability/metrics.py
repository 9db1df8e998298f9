"""Prometheus metrics: vLLM's names and meanings after the prefix `octavo:`, or after vLLM's own.

All times are in seconds. Every metric but that of adapters has vLLM's labels `model_name` and
`engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from octavo.messages import FinishReason
from octavo.observability.scheduler_stats import SCHEDULER_METRICS, SchedulerStats
from octavo.outputs import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `EngineMetrics.render`."""

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_BUCKETS = tuple(float(2**n) for n in range(15))
_RECOVERY_BUCKETS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PREEMPTION_BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20)
_LABELS = ("model_name", "engine")
# Metrics that are sums over the engine process and its workers. All others are the engine process'.
_SUMMED = ("_memory_bytes", "_cpu_seconds_total", "_open_fds")


class _Metric(NamedTuple):
    """Metric that the front end records."""

    kind: type[Gauge | Counter | Histogram]
    name: str
    help: str
    buckets: Sequence[float] | None = None
    """Buckets of a histogram; None: 1, 2, 5, 10 and so on, up to `max_model_len`."""
    label: str = ""
    """Label in addition to those of every metric."""
    values: Sequence[str] = ("",)
    """Values of `label` that exist from the start."""


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_METRICS = (
    _Metric(
        Histogram,
        "iteration_tokens_total",
        "Tokens of a step: generated ones, and computed ones of prompts that it completed.",
        _ITERATION_BUCKETS,
    ),
    _Metric(Counter, "prompt_tokens", "Prompt tokens of completed prompts."),
    _Metric(Counter, "prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
    _Metric(
        Counter,
        "prompt_tokens_by_source",
        "Prompt tokens by source: computed here, or found in the prefix cache.",
        label="source",
        values=("local_compute", "local_cache_hit"),
    ),
    _Metric(Counter, "generation_tokens", "Tokens generated."),
    _Metric(Histogram, "time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS),
    _Metric(Histogram, "inter_token_latency_seconds", "Time between outputs.", _TOKEN_TIME_BUCKETS),
    _Metric(
        Histogram,
        "request_time_per_output_token_seconds",
        "Mean time of a request's tokens after the first.",
        _TOKEN_TIME_BUCKETS,
    ),
    _Metric(Histogram, "e2e_request_latency_seconds", "Arrival to end.", _REQUEST_TIME_BUCKETS),
    _Metric(
        Histogram, "request_queue_time_seconds", "Arrival to first step.", _REQUEST_TIME_BUCKETS
    ),
    _Metric(
        Histogram,
        "request_prefill_time_seconds",
        "First step to first token.",
        _REQUEST_TIME_BUCKETS,
    ),
    _Metric(
        Histogram,
        "request_decode_time_seconds",
        "First token to last token.",
        _REQUEST_TIME_BUCKETS,
    ),
    _Metric(
        Histogram,
        "request_inference_time_seconds",
        "First step to last token.",
        _REQUEST_TIME_BUCKETS,
    ),
    _Metric(Histogram, "request_prompt_tokens", "Prompt tokens of a request."),
    _Metric(Histogram, "request_generation_tokens", "Tokens generated for a request."),
    _Metric(
        Histogram,
        "request_max_num_generation_tokens",
        "Tokens generated for the longest of a request's n answers.",
    ),
    _Metric(
        Histogram,
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not in the prefix cache.",
    ),
    _Metric(Histogram, "request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS),
    _Metric(Histogram, "request_params_n", "The parameter n.", (1, 2, 5, 10, 20)),
    _Metric(Histogram, "request_params_max_tokens", "The parameter max_tokens."),
    _Metric(
        Counter,
        "request_success",
        "Requests that ended, by reason.",
        label="finished_reason",
        values=tuple(map(str, FinishReason)),
    ),
    _Metric(
        Counter,
        "repetitions",
        "Answers that repeated themselves, by action of the repetition guard.",
        label="action",
        values=("report", "stop", "close_thinking"),
    ),
    _Metric(
        Counter, "requests_aborted", "Requests that the client cancelled or the server withdrew."
    ),
    _Metric(
        Gauge,
        "engine_sleep_state",
        "1 for the engine's state: awake, asleep at level 1 (weights_offloaded) or 2 (discard_all)",
        label="sleep_state",
        values=_SLEEP_STATES,
    ),
    _Metric(Counter, "engine_restarts", "Engines that died and were replaced."),
    _Metric(Counter, "requests_recovered", "Requests that another engine continued."),
    _Metric(
        Histogram,
        "recovery_seconds",
        "Time from an engine's death until its replacement accepted requests.",
        _RECOVERY_BUCKETS,
    ),
    _Metric(
        Counter,
        "streams_resumed",
        "Times that a client reconnected to a stream and continued to read it.",
    ),
    _Metric(
        Counter,
        "admission_rejections",
        "Requests rejected on arrival, by reason.",
        label="reason",
        values=(),
    ),
    _Metric(
        Counter,
        "trace_spans_dropped",
        "Spans of requests that the collector of otlp_traces_endpoint did not accept in time.",
    ),
)


class EngineMetrics:
    """Metrics of one engine of a served model, in a registry shared with the model's other engines.

    Only one thread may record, except for dropped spans. Any thread may call `render`.

    Args:
        model_name: value of the label `model_name`.
        max_model_len: upper end of the buckets that count a request's tokens.
        prefix: prefix of the names, without the colon.
        engine_index: the engine's number in this process.
        others: metrics of another engine of the model, to share a registry with.
        first_engine: offset of the label `engine`: the number of engines of earlier servers.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        prefix: str = "octavo",
        engine_index: int = 0,
        others: EngineMetrics | None = None,
        first_engine: int = 0,
    ) -> None:
        self._prefix, self._first_engine = prefix, first_engine
        self._model_name, self._max_model_len = model_name, max_model_len
        self._labels = {"model_name": model_name, "engine": str(first_engine + engine_index)}
        if others is None:
            self._registry = CollectorRegistry()
            self._families: dict[str, Any] = {}
            self._engines: dict[int, EngineMetrics] = {}
            self._processes = _Processes(self._registry)
        else:
            self._registry, self._families = others._registry, others._families
            self._engines, self._processes = others._engines, others._processes
        self._engines[engine_index] = self
        self._last_stats = SchedulerStats()
        self._step_prompt_tokens = 0
        self._children: dict[tuple[str, str], Any] = {}
        for stat in SCHEDULER_METRICS:
            kind = Gauge if stat.kind == "gauge" else Counter
            family = self._family(kind, stat.name, stat.help, [*_LABELS, *stat.labels])
            if "" not in stat.labels.values():
                family.labels(**self._labels, **stat.labels)
        tokens = _buckets_1_2_5(max_model_len)
        for metric in _METRICS:
            settings = {"buckets": metric.buckets or tokens} if metric.kind is Histogram else {}
            labels = [*_LABELS, metric.label] if metric.label else _LABELS
            self._family(metric.kind, metric.name, metric.help, labels, **settings)
            for value in metric.values:
                self._get(metric.name, value)
        self.record_sleep_state(None)

    def for_engine(self, index: int) -> EngineMetrics:
        """Return the metrics of another engine of the model; all share one page."""
        if index not in self._engines:
            settings = self._model_name, self._max_model_len, self._prefix, index
            EngineMetrics(*settings, self, self._first_engine)
        return self._engines[index]

    def add_engine(self, index: int) -> None:
        """Add the engine with this number, or add it again after its removal."""
        self._engines.pop(index, None)
        self.for_engine(index)

    def remove_engine(self, index: int) -> None:
        """Remove the gauges and processes of an engine that has ended; keep its counters."""
        engine = self.for_engine(index)
        engine._last_stats = SchedulerStats()
        for family in self._families.values():
            if isinstance(family, Gauge):
                for sample in next(iter(family.collect())).samples:
                    if sample.labels["engine"] == engine._labels["engine"]:
                        family.remove(*sample.labels.values())
        self._processes.remove(engine._labels["engine"])

    def record_scheduler_stats(self, stats: SchedulerStats) -> None:
        """Record the scheduler's state after a step.

        A restarted engine counts from zero again; the metrics keep growing.
        """
        if stats.num_steps < self._last_stats.num_steps:
            self.engine_restarted()
        last, self._last_stats = self._last_stats, stats
        for metric in SCHEDULER_METRICS:
            family = self._families[metric.name]
            value, before = getattr(stats, metric.field), getattr(last, metric.field)
            if isinstance(value, list):
                (name,) = metric.labels
                for i, (new, old) in enumerate(zip_longest(value, before, fillvalue=0)):
                    if name == "layer" and not stats.expert_tokens[i : i + 1] > [0]:
                        continue  # it has no experts
                    child = family.labels(**self._labels, **{name: str(i)})
                    child.set(new) if metric.kind == "gauge" else child.inc(new - old)
            elif metric.kind == "gauge":
                if value != before or not last.num_steps:
                    family.labels(**self._labels, **metric.labels).set(value)
            elif value != before:
                family.labels(**self._labels, **metric.labels).inc(value - before)

    def keep_stats(self, stats: SchedulerStats) -> None:
        """Record the scheduler's state for `load` only; another process counts it."""
        self._last_stats = stats

    def engine_restarted(self) -> None:
        """Expect the next stats from a new engine with counters that start at zero."""
        self._last_stats = SchedulerStats()

    def record_first_token(
        self, time_to_first_token: float, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """Record the first token of a request, which completes its prompt."""
        self._get("time_to_first_token_seconds").observe(time_to_first_token)
        self.record_prompt(num_prompt_tokens, num_cached_tokens)

    def record_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Record a completed prompt."""
        self._get("prompt_tokens").inc(num_prompt_tokens)
        self._get("prompt_tokens_cached").inc(num_cached_tokens)
        self._get("prompt_tokens_by_source", "local_cache_hit").inc(num_cached_tokens)
        self._get("prompt_tokens_by_source", "local_compute").inc(
            num_prompt_tokens - num_cached_tokens
        )
        self._step_prompt_tokens += num_prompt_tokens - num_cached_tokens

    def record_inter_token_latencies(self, latencies: Sequence[float]) -> None:
        """Record the time between the two latest outputs of each request with a new output."""
        observe = self._get("inter_token_latency_seconds").observe
        for latency in latencies:
            observe(latency)

    def record_generation_tokens(self, num_tokens: int) -> None:
        """Record the number of tokens of a step; called once for each step with outputs."""
        self._get("generation_tokens").inc(num_tokens)
        self._get("iteration_tokens_total").observe(self._step_prompt_tokens + num_tokens)
        self._step_prompt_tokens = 0

    def record_finished(
        self,
        reason: FinishReason,
        times: RequestMetrics,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_generation_tokens: int,
        max_tokens: int | None,
    ) -> None:
        """Record the end of a core request (each of n answers is one)."""
        self._get("request_success", str(reason)).inc()
        if reason == FinishReason.ABORT:
            self._get("requests_aborted").inc()
        self._get("request_prompt_tokens").observe(num_prompt_tokens)
        self._get("request_generation_tokens").observe(num_generation_tokens)
        if max_tokens is not None:
            self._get("request_params_max_tokens").observe(max_tokens)
        if times.finished_time is not None:
            self._get("e2e_request_latency_seconds").observe(
                times.finished_time - times.arrival_time
            )
        self._get("request_num_preemptions").observe(times.num_preemptions)
        if times.first_scheduled_time is None:
            return
        self._get("request_queue_time_seconds").observe(
            times.first_scheduled_time - times.arrival_time
        )
        if times.first_token_time is None or times.last_token_time is None:
            return
        decode_time = times.last_token_time - times.first_token_time
        self._get("request_prefill_kv_computed_tokens").observe(
            num_prompt_tokens - num_cached_tokens
        )
        self._get("request_prefill_time_seconds").observe(
            times.first_token_time - times.first_scheduled_time
        )
        self._get("request_decode_time_seconds").observe(decode_time)
        self._get("request_inference_time_seconds").observe(
            times.last_token_time - times.first_scheduled_time
        )
        if num_generation_tokens > 1:
            self._get("request_time_per_output_token_seconds").observe(
                decode_time / (num_generation_tokens - 1)
            )

    def record_repetition(self, action: str) -> None:
        """Record that the repetition guard found a loop in an answer."""
        self._get("repetitions", action).inc()

    def record_all_finished(self, n: int, max_num_generation_tokens: int) -> None:
        """Record the end of a caller's request: its n and the tokens of its longest answer."""
        self._get("request_params_n").observe(n)
        self._get("request_max_num_generation_tokens").observe(max_num_generation_tokens)

    def record_rejection(self, reason: str) -> None:
        """Record the reason for rejecting a request on arrival, for example "queue_full"."""
        self._get("admission_rejections", reason).inc()

    def record_dropped_spans(self, count: int) -> None:
        """Record that spans could not be sent; any thread may call it."""
        self._get("trace_spans_dropped").inc(count)

    def record_sleep_state(self, level: int | None) -> None:
        """Record the level at which the engine sleeps; None: awake."""
        for state, at in zip(_SLEEP_STATES, (None, 1, 2), strict=True):
            self._get("engine_sleep_state", state).set(level == at)

    def set_cache_config_info(self, info: Mapping[str, object]) -> None:
        """Export the KV cache's settings as labels of `cache_config_info`; call it only once."""
        labels = self._labels | {name: str(value) for name, value in info.items()}
        self._family(
            Gauge, "cache_config_info", "Settings of the KV cache, as labels.", list(labels)
        ).labels(**labels).set(1)

    def record_recovery(self, num_requests: int, seconds: float) -> None:
        """Record the replacement of a dead engine: its duration and the continued requests."""
        self._get("engine_restarts").inc()
        self._get("requests_recovered").inc(num_requests)
        self._get("recovery_seconds").observe(seconds)
        self.record_scheduler_stats(SchedulerStats())  # the state of the new engine

    def record_resume(self) -> None:
        """Record that a client continues to read a stream."""
        self._get("streams_resumed").inc()

    def watch_processes(self, get_pids: Callable[[], list[int]]) -> None:
        """Export memory and CPU time of the engine process and its workers; call it only once.

        The names are Prometheus' usual ones, such as `octavo_engine_process_resident_memory_bytes`,
        with any prefix: vLLM has no equivalents.

        Args:
            get_pids: returns the current process ids, the engine's first; -1 for a process on
                another machine.
        """
        self._processes.add(self._labels["engine"], get_pids)

    def load(self) -> dict[str, float]:
        """Return the load of all engines together, for load balancers.

        The keys are the metrics' names without their prefix.
        """
        stats = SchedulerStats.join([engine._last_stats for engine in self._engines.values()])
        return {
            "kv_cache_usage_perc": stats.kv_cache_usage,
            "num_requests_running": float(stats.num_running_reqs),
            "num_requests_waiting": float(stats.num_waiting_reqs),
        }

    def watch_adapters(
        self, max_loras: int, find_names: Callable[[], tuple[list[str], list[str]]]
    ) -> None:
        """Show the adapters of unfinished requests from now on.

        Args:
            max_loras: the setting of this name.
            find_names: returns the names of the adapters of requests that have tokens, and of those
                that wait for their first token.
        """
        _AdapterInfo(self._registry, f"{self._prefix}:lora_requests_info", max_loras, find_names)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _get(self, name: str, value: str = "") -> Any:
        """Return this engine's metric with a name of `_METRICS`, and a value of its label."""
        key = name, value
        if key not in self._children:
            labels = [*self._labels.values(), value] if value else self._labels.values()
            self._children[key] = self._families[name].labels(*labels)
        return self._children[key]

    def _family(
        self,
        kind: type[Gauge | Counter | Histogram],
        name: str,
        help: str,
        labels: Sequence[str],
        **settings: Any,
    ) -> Any:
        """Return a metric of all engines, with all values of its labels; create it once."""
        if name not in self._families:
            self._families[name] = kind(
                f"{self._prefix}:{name}", help, labels, registry=self._registry, **settings
            )
        return self._families[name]


class _Processes(Collector):
    """Memory and CPU time of engines' processes, with the label `engine`.

    Args:
        registry: the registry that collects them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pids: dict[str, Callable[[], list[int]]] = {}
        registry.register(self)

    def add(self, engine: str, get_pids: Callable[[], list[int]]) -> None:
        """Add an engine's processes."""
        self._pids[engine] = get_pids

    def remove(self, engine: str) -> None:
        """Remove an engine's processes."""
        self._pids.pop(engine, None)

    def collect(self) -> Iterator[Metric]:
        """Implement `Collector.collect`."""
        families: dict[str, Metric] = {}
        for engine, get_pids in self._pids.copy().items():
            values: dict[tuple[str, str], float] = {}
            for number, pid in enumerate(get_pids()):
                process = ProcessCollector("octavo_engine", partial(int, pid), registry=None)
                for family in process.collect():
                    families.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        key = family.name, sample.name
                        if not number or sample.name.endswith(_SUMMED):
                            values[key] = values.get(key, 0.0) + sample.value
            for (family_name, name), value in values.items():
                families[family_name].add_sample(name, {"engine": engine}, value)
        yield from families.values()


class _AdapterInfo(Collector):
    """vLLM's metric of adapters: their names are labels, and the value is the time."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        max_loras: int,
        find_names: Callable[[], tuple[list[str], list[str]]],
    ) -> None:
        self._name, self._max_loras, self._find_names = name, max_loras, find_names
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Implement `Collector.collect`."""
        running, waiting = self._find_names()
        metric = Metric(self._name, "Adapters of unfinished requests.", "gauge")
        labels = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
        }
        metric.add_sample(self._name, labels, time.time())
        yield metric


def join_pages(pages: Iterable[bytes]) -> bytes:
    """Join the metrics pages of several processes of a server into one, in Prometheus' text format.

    Counters are added up. Only one process exports a state, so a gauge is the largest value.

    Args:
        pages: results of `EngineMetrics.render`.
    """
    return generate_latest(_Joined(pages))


class _Joined(Collector):
    def __init__(self, pages: Iterable[bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """Implement `Collector.collect`."""
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                of_family = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, tuple(sample.labels.items())
                    known = of_family.get(key, 0.0)
                    is_gauge = family.type == "gauge"
                    of_family[key] = max(known, sample.value) if is_gauge else known + sample.value
        for name, family in families.items():
            for (sample_name, labels), value in values[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family


def _buckets_1_2_5(highest: int) -> tuple[float, ...]:
    """Return the buckets 1, 2, 5, 10, 20, 50 ... up to `highest`."""
    buckets: list[float] = []
    power = 1
    while power <= highest:
        buckets += [float(m * power) for m in (1, 2, 5) if m * power <= highest]
        power *= 10
    return tuple(buckets)
