"""Metrics as objects."""

from octavo.observability.metrics import EngineMetrics
from octavo.observability.metrics_reader import Counter, Gauge, Histogram, Vector, read_metrics
from octavo.observability.scheduler_stats import SchedulerStats


def test_each_kind():
    metrics = EngineMetrics("m", 100)
    metrics.record_scheduler_stats(
        SchedulerStats(
            num_running_reqs=3,
            num_drafts=2,
            num_draft_tokens=6,
            num_accepted_tokens_per_pos=[2, 1, 0],
            prefix_cache_hits=7,
        )
    )
    metrics.record_inter_token_latencies([0.002, 5.0])
    found = {
        metric.name.partition(":")[2]: metric for metric in read_metrics(metrics.render().decode())
    }
    running = found["num_requests_running"]
    assert isinstance(running, Gauge)
    assert running.value == 3
    assert running.labels["model_name"] == "m"
    hits = found["prefix_cache_hits"]
    assert isinstance(hits, Counter)
    assert hits.value == 7
    accepted = found["spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(accepted, Vector)
    assert accepted.values == [2, 1, 0]
    latency = found["inter_token_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert (latency.count, latency.sum) == (2, 5.002)
    assert latency.buckets["0.0025"] == 1
    assert latency.buckets["+Inf"] == 2
    assert "le" not in latency.labels


def test_no_metrics_are_none():
    assert read_metrics("") == []
