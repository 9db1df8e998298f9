"""The router's own metrics; each server has its own."""

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
        num_restarts: how often one of its own was started again.
    """

    def __init__(self, pools: Sequence[Pool], num_restarts: Callable[[], int]) -> None:
        self._pools = pools
        self._num_restarts = num_restarts
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.retries = Counter(
            "octavo:router_retries",
            "Requests that went to another server, by reason: unreachable, lost, or refused.",
            ["reason"],
            registry=self._registry,
        )
        self.prefills = Counter(
            "octavo:router_prefills",
            "Prompts computed by a prefill server (remote) or by who answers (local).",
            ["where"],
            registry=self._registry,
        )
        self.tokens = Counter(
            "octavo:router_tokens",
            "Tokens of prompts and outputs, as far as answers say.",
            ["kind"],
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The page at /metrics."""
        return generate_latest(self._registry)

    def note_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Counts the tokens of an answer."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("completion").inc(completion_tokens)

    def collect(self) -> Iterator[Metric]:
        """What is known without counting."""
        ready = GaugeMetricFamily(
            "octavo:router_server_ready", "Whether a server takes requests.", labels=["server"]
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
            "Times that one of the router's own servers was started again.",
            self._num_restarts(),
        )
        pieces = sum(pool.num_pieces for pool in self._pools)
        known = sum(pool.num_known for pool in self._pools)
        yield CounterMetricFamily(
            "octavo:router_prefix_queries", "Pieces of prompts that were placed.", pieces
        )
        yield CounterMetricFamily(
            "octavo:router_prefix_hits", "Those whose server likely had them cached.", known
        )
