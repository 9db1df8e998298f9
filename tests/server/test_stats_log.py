"""Line of statistics: its content, and the intervals without one."""

import logging
from itertools import pairwise

import pytest

from octavo.messages import SchedulerStats
from octavo.observability.metrics import EngineMetrics
from octavo.server.stats_log import StatsLog


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.INFO, "octavo.server.stats_log")
    return lambda: caplog.records


@pytest.mark.parametrize("prefix", ["octavo", "vllm"])
def test_it_tells_what_was_done_since_the_last_one(lines, prefix):
    metrics = EngineMetrics("m", 100, prefix)
    metrics.record_first_token(0.1, 50, 10)
    log = StatsLog(metrics.render())
    metrics.record_first_token(0.1, 40, 30)
    metrics.record_generation_tokens(25)
    stats = SchedulerStats(2, 1, 0.25, prefix_cache_queries=80, prefix_cache_hits=60)
    metrics.record_scheduler_stats(stats)
    other = SchedulerStats(3, 4, 0.75, prefix_cache_queries=20, prefix_cache_hits=0)
    metrics.for_engine(1).record_scheduler_stats(other)
    log.log(metrics.render(), 10.0)
    (line,) = lines()
    assert line.getMessage() == "statistics"
    said = {name: value for name, value in vars(line).items() if name in FIELDS}
    assert said == dict(zip(FIELDS, (4.0, 2.5, 5, 5, 0.5, 0.6), strict=True))
    log.log(metrics.render(), 10.0)
    assert lines()[1].generation_tokens_per_s == 0
    assert not hasattr(lines()[1], "prefix_cache_hit_rate")  # no look-up happened


FIELDS = [
    "prompt_tokens_per_s",
    "generation_tokens_per_s",
    "running",
    "waiting",
    "kv_cache_usage",
    "prefix_cache_hit_rate",
]


def test_an_idle_server_says_so_once(lines):
    metrics = EngineMetrics("m", 100)
    counts = []
    log = StatsLog(metrics.render())
    for tokens in (0, 0, 5, 0, 0, 0, 5, 0, 0):
        if tokens:
            metrics.record_generation_tokens(tokens)
        log.log(metrics.render(), 1.0)
        counts.append(len(lines()))
    assert [after - before for before, after in pairwise([0, *counts])] == [
        *(0, 0, 1, 1, 0, 0, 1, 1, 0)
    ]
    metrics.record_scheduler_stats(SchedulerStats(num_waiting_reqs=1))
    log.log(metrics.render(), 1.0)
    assert lines()[-1].waiting == 1
