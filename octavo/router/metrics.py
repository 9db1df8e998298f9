"""Metrics of the router itself; each server has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.router.pool import Pool


class RouterMetrics(Collector):
    """Prometheus metrics of one router.

    Args:
        pools: its servers.
        num_restarts: returns the number of restarts of the servers that it started.
    """

    def __init__(self, pools: Sequence[Pool], num_restarts: Callable[[], int]) -> None:
        self._pools = pools
        self._num_restarts = num_restarts
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.retries = Counter(
            "octavo:router_retries",
            "Requests that were sent to another server, by reason: unreachable, lost, or refused.",
            ["reason"],
            registry=self._registry,
        )
        self.prefills = Counter(
            "octavo:router_prefills",
            "Prompts computed by a prefill server (remote) or by the answering one (local).",
            ["where"],
            registry=self._registry,
        )
        self.tokens = Counter(
            "octavo:router_tokens",
            "Tokens of prompts and outputs, as reported by answers.",
            ["kind"],
            registry=self._registry,
        )

    def render(self) -> bytes:
        """Return the page at /metrics."""
        return generate_latest(self._registry)

    def note_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("completion").inc(completion_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that need no counting."""
        ready = GaugeMetricFamily(
            "octavo:router_server_ready", "1 if a server accepts requests.", labels=["server"]
        )
        requests = GaugeMetricFamily(
            "octavo:router_requests", "Requests in flight at a server.", labels=["server"]
        )
        for pool in self._pools:
            for upstream in pool.upstreams:
                ready.add_metric([upstream.name], upstream.ready and not upstream.leaving)
                requests.add_metric([upstream.name], upstream.num_requests)
        yield from (ready, requests)
        yield CounterMetricFamily(
            "octavo:router_server_restarts",
            "Number of restarts of the router's own servers.",
            self._num_restarts(),
        )
        pieces = sum(pool.num_pieces for pool in self._pools)
        known = sum(pool.num_known for pool in self._pools)
        yield CounterMetricFamily(
            "octavo:router_prefix_queries", "Pieces of prompts that were placed.", pieces
        )
        yield CounterMetricFamily(
            "octavo:router_prefix_hits", "Pieces that their server likely had cached.", known
        )
