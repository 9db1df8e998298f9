"""Load of an engine over time, for plots."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.observability.scheduler_stats import SchedulerStats

_MOST_POINTS = 4000


@dataclass
class Timeline:
    """Load of an engine over time; points are in the order of time.

    Attributes:
        times: seconds since the start.
        waiting: number of waiting requests.
        running: number of running requests.
        kv_usage: share of KV blocks in use.
    """

    times: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    kv_usage: list[float] = field(default_factory=list)
    _gap: float = 0.0

    def note(self, now: float, stats: SchedulerStats) -> None:
        """Add a point, except close to the last one; thin the points out when full."""
        if self.times and now < self.times[-1] + self._gap:
            return
        self.times.append(now)
        self.waiting.append(stats.num_waiting_reqs)
        self.running.append(stats.num_running_reqs)
        self.kv_usage.append(stats.kv_cache_usage)
        if len(self.times) >= _MOST_POINTS:
            self._gap = 2 * (self.times[-1] - self.times[0]) / _MOST_POINTS
            for values in (self.times, self.waiting, self.running, self.kv_usage):
                del values[1::2]
