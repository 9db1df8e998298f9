"""Metrics of requests, under vLLM's names.

Conventions:

- TTFT: from sending a request to its first token.
- TPOT: the mean time of a request's tokens after the first, (last - first) / (tokens - 1). A
  request with fewer than two tokens has none and is not part of TPOT figures.
- ITL: the time between two arrivals. The tokens of one event of a stream are one arrival: an ITL is
  the pause that a reader sees, so it is neither divided among the event's tokens nor followed by
  zeros. If events contain several tokens, ITL is larger than TPOT.
- E2EL: from sending a request to its last token.
- Latency starts when a request is actually sent; its delay is the client's lag, which
  `octavo.bench.serve` reports separately.
- Failed requests are not part of latencies and throughputs, only of `failed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console

from octavo.errors import ConfigError

LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Latencies by their short names: abbreviation, title."""

_WIDTH = 50


@dataclass
class RequestRecord:
    """Times and sizes of one request. All times are in seconds since the run began.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        num_output_tokens: tokens of the answer.
        scheduled_time: time at which the request should have been sent.
        start_time: time at which it was sent.
        token_times: arrivals of its tokens; the tokens of one event are one arrival.
        error: cause of a failure, or None.
        text: the answer, if it was kept.
        num_cached_tokens: prompt tokens from the server's prefix cache.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    scheduled_time: float
    start_time: float
    token_times: list[float] = field(default_factory=list)
    error: str | None = None
    text: str | None = None
    num_cached_tokens: int = 0

    @property
    def end_time(self) -> float:
        """Arrival of the last token; the start without tokens."""
        return self.token_times[-1] if self.token_times else self.start_time

    @property
    def ttft(self) -> float:
        """Time to the first token in seconds; NaN without tokens."""
        return self.token_times[0] - self.start_time if self.token_times else math.nan

    @property
    def tpot(self) -> float:
        """Mean time of the tokens after the first in seconds; NaN below two tokens."""
        if self.num_output_tokens < 2 or not self.token_times:
            return math.nan
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Times between arrivals in seconds."""
        return np.diff(self.token_times).tolist() if len(self.token_times) > 1 else []

    @property
    def e2el(self) -> float:
        """Time to the last token in seconds; NaN without tokens."""
        return self.token_times[-1] - self.start_time if self.token_times else math.nan


def parse_goodput(value: str | Sequence[str]) -> dict[str, float]:
    """Parse service levels.

    Args:
        value: "ttft:200,tpot:50,e2el:5000", or vLLM's list of words "ttft:200" "tpot:50".

    Returns:
        Time limits in milliseconds by latency: ttft, tpot or e2el.

    Raises:
        ConfigError: a word does not have the form name:milliseconds.
    """
    text = value if isinstance(value, str) else " ".join(value)
    levels: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition(":")
        if name not in ("ttft", "tpot", "e2el") or name in levels:
            raise ConfigError(
                f"--goodput {word!r}: must be ttft:MS, tpot:MS or e2el:MS, each at most once."
            )
        try:
            levels[name] = float(number)
        except ValueError:
            levels[name] = math.nan
        if not 0 < levels[name] < math.inf:
            raise ConfigError(f"--goodput {word!r}: {number!r} is not a number of ms above 0.")
    if not levels:
        raise ConfigError("--goodput is empty; write for example ttft:200,tpot:50.")
    return levels


def is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Return True if a request succeeded within its service levels (ms); a missing TPOT is good."""
    if record.error is not None:
        return False
    times = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return not any(times[name] * 1000 > limit for name, limit in goodput.items())


def summarize(
    records: Sequence[RequestRecord],
    duration: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Compute the figures of a run.

    Args:
        records: all requests, including failed ones.
        duration: duration of the whole run, in seconds.
        percentiles: percentiles of each latency, 0 to 100, interpolated linearly.
        goodput: service levels in ms, see `parse_goodput`.

    Returns:
        duration, completed, failed, total_input_tokens, total_output_tokens, request_throughput,
        output_throughput and total_token_throughput (per second), max_output_tokens_per_s (best of
        the whole seconds), max_concurrent_requests, cached_tokens; mean_, median_, std_ and p<N>_
        of ttft_ms, tpot_ms, itl_ms and e2el_ms, NaN without measurements; request_goodput (good
        requests per second), only with `goodput`.
    """
    good = [r for r in records if r.error is None]
    num_input = sum(r.num_prompt_tokens for r in good)
    num_output = sum(r.num_output_tokens for r in good)
    per_second = 1 / duration if duration > 0 else math.nan
    summary: dict[str, float] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "cached_tokens": sum(r.num_cached_tokens for r in good),
        "request_throughput": len(good) * per_second,
        "output_throughput": num_output * per_second,
        "total_token_throughput": (num_input + num_output) * per_second,
        "max_output_tokens_per_s": _most_tokens_in_a_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    if goodput is not None:
        summary["request_goodput"] = sum(is_good(r, goodput) for r in good) * per_second
    latencies = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good],
        "itl": [itl for r in good for itl in r.itls],
        "e2el": [r.e2el for r in good],
    }
    for name, seconds in latencies.items():
        values = np.asarray(seconds, np.float64) * 1000
        values = values[~np.isnan(values)]
        empty = not len(values)
        summary[f"mean_{name}_ms"] = math.nan if empty else float(values.mean())
        summary[f"median_{name}_ms"] = math.nan if empty else float(np.median(values))
        summary[f"std_{name}_ms"] = math.nan if empty else float(values.std())
        for p in percentiles:
            value = math.nan if empty else float(np.percentile(values, p))
            summary[f"p{p:g}_{name}_ms"] = value
    return summary


def print_summary(
    summary: Mapping[str, object],
    *,
    latencies: Sequence[str] = ("ttft", "tpot", "itl"),
    title: str = "Serving Benchmark Result",
    console: Console | None = None,
) -> None:
    """Print figures in vLLM's layout.

    Args:
        summary: result of `summarize`, optionally with more figures. Lines without a figure are
            omitted.
        latencies: latencies of `LATENCIES` to show.
        title: title of the table.
        console: destination; default: the terminal.
    """
    console = console or Console(highlight=False, soft_wrap=True)

    def line(label: str, key: str) -> None:
        value = summary.get(key)
        if value is None:
            return
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        console.print(f"{label:<40}{shown:>10}", markup=False)

    console.print(f" {title} ".center(_WIDTH, "="), markup=False, style="bold")
    line("Successful requests:", "completed")
    line("Failed requests:", "failed")
    line("Maximum request concurrency:", "max_concurrency")
    line("Request rate configured (RPS):", "request_rate")
    line("Benchmark duration (s):", "duration")
    line("Total input tokens:", "total_input_tokens")
    line("Total generated tokens:", "total_output_tokens")
    line("Cached input tokens:", "cached_tokens")
    line("Request throughput (req/s):", "request_throughput")
    line("Request goodput (req/s):", "request_goodput")
    line("Output token throughput (tok/s):", "output_throughput")
    line("Peak output token throughput (tok/s):", "max_output_tokens_per_s")
    line("Peak concurrent requests:", "max_concurrent_requests")
    line("Total token throughput (tok/s):", "total_token_throughput")
    line("Most KV cache in use (%):", "kv_cache_usage_max_perc")
    line("Prefix cache hit rate (%):", "prefix_cache_hit_rate_perc")
    line("Preemptions:", "num_preemptions")
    line("Draft acceptance rate (%):", "spec_decode_acceptance_rate_perc")
    line("Draft acceptance length:", "spec_decode_acceptance_length")
    for name in latencies:
        short, long = LATENCIES[name]
        console.print(long.center(_WIDTH, "-"), markup=False)
        line(f"Mean {short} (ms):", f"mean_{name}_ms")
        line(f"Median {short} (ms):", f"median_{name}_ms")
        for key in summary:
            if key.startswith("p") and key.endswith(f"_{name}_ms"):
                line(f"{key.split('_')[0].upper()} {short} (ms):", key)
    console.print("=" * _WIDTH, markup=False, style="bold")


def _most_tokens_in_a_second(records: Sequence[RequestRecord]) -> float:
    """Return the tokens of the best whole second; arrivals of a record share its tokens."""
    times = [t for r in records for t in r.token_times]
    if not times:
        return 0.0
    weights = [r.num_output_tokens / len(r.token_times) for r in records for _ in r.token_times]
    _, second = np.unique(np.floor(times), return_inverse=True)  # there may be years between
    return float(np.bincount(second, weights).max())


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    """Return the maximum number of concurrent requests; ends precede starts."""
    changes = [(r.start_time, 1) for r in records] + [(r.end_time, -1) for r in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
