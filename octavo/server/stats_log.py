"""Periodic log line with the throughput of a server."""

from __future__ import annotations

import logging
import re
from collections import defaultdict

logger = logging.getLogger(__name__)

_SAMPLE = re.compile(
    r"^\w+:(prompt_tokens_total|generation_tokens_total|num_requests_running|num_requests_waiting"
    r"|kv_cache_usage_perc|prefix_cache_queries_total|prefix_cache_hits_total)\{.*\} (\S+)$",
    re.MULTILINE,
)


class StatsLog:
    """Logger of the changes from one page of metrics to the next.

    Args:
        page: the first page, in Prometheus' text format.
    """

    def __init__(self, page: bytes) -> None:
        self._last = _read(page)
        self._was_idle = True

    def log(self, page: bytes, seconds: float) -> None:
        """Log one line if the server was active in this interval or in the one before.

        Args:
            page: the current metrics of all engines.
            seconds: time since the page before.
        """
        now, last = _read(page), self._last
        self._last = now
        # An engine that replaces another one counts from zero again.
        new = {name: max(0.0, sum(now[name]) - sum(last[name])) for name in now}
        running, waiting = sum(now["num_requests_running"]), sum(now["num_requests_waiting"])
        prompt, generated = new["prompt_tokens_total"], new["generation_tokens_total"]
        is_idle = not (running or waiting or prompt or generated)
        if not (is_idle and self._was_idle):
            usage, queries = now["kv_cache_usage_perc"], new["prefix_cache_queries_total"]
            fields: dict[str, object] = {
                "prompt_tokens_per_s": round(prompt / seconds, 1),
                "generation_tokens_per_s": round(generated / seconds, 1),
                "running": int(running),
                "waiting": int(waiting),
                "kv_cache_usage": round(sum(usage) / max(1, len(usage)), 3),
            }
            if queries > 0:
                hits = new["prefix_cache_hits_total"]
                fields["prefix_cache_hit_rate"] = round(hits / queries, 3)
            logger.info("statistics", extra=fields)
        self._was_idle = is_idle


def _read(page: bytes) -> dict[str, list[float]]:
    """Return the values of the logged metrics, one for each engine."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in _SAMPLE.findall(page.decode()):
        values[name].append(float(value))
    return values
