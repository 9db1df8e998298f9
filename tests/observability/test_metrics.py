"""Metrics: names, counters across restarts, times, vLLM's dashboards."""

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.messages import FinishReason
from octavo.observability.metrics import EngineMetrics, join_pages
from octavo.observability.metrics_reader import read_metrics
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.outputs import RequestMetrics
from tests.hostile import NAMES as HOSTILE

# vLLM's names, with the prefix changed.
NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "encoder_cache_usage_perc",
    "mm_cache_queries",
    "mm_cache_hits",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "state_snapshots",
    "state_snapshot_evictions",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "kv_failed_loads",
    "kv_expired_reqs",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_drafting_paused",
    "expert_cache_hits",
    "expert_cache_misses",
    "expert_cache_read_bytes",
    "expert_cache_fetched_ahead",
    "expert_cache_fetched_ahead_used",
    "expert_tokens",
    "expert_max_share",
    "expert_balancedness",
    "eplb_balancedness",
    "eplb_rearrangements",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "prompt_tokens_cached_by_source",
    "generation_tokens",
    "iteration_tokens_total",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "admission_rejections",
    "repetitions",
    "requests_aborted",
    "cache_config_info",
    "engine_sleep_state",
    "engine_restarts",
    "requests_recovered",
    "recovery_seconds",
    "streams_resumed",
    "trace_spans_dropped",
}

# Samples that the panels of vLLM's three published Grafana dashboards query, without the prefix,
# and the labels by which the queries select or sum up.
DASHBOARDS = {
    "prometheus_grafana/grafana.json": {
        "e2e_request_latency_seconds_bucket": {"model_name", "le"},
        "e2e_request_latency_seconds_sum": {"model_name"},
        "e2e_request_latency_seconds_count": {"model_name"},
        "prompt_tokens_total": {"model_name"},
        "generation_tokens_total": {"model_name"},
        "inter_token_latency_seconds_bucket": {"model_name", "le"},
        "inter_token_latency_seconds_sum": {"model_name"},
        "inter_token_latency_seconds_count": {"model_name"},
        "num_requests_running": {"model_name"},
        "num_requests_waiting": {"model_name"},
        "time_to_first_token_seconds_bucket": {"model_name", "le"},
        "time_to_first_token_seconds_sum": {"model_name"},
        "time_to_first_token_seconds_count": {"model_name"},
        "kv_cache_usage_perc": {"model_name"},
        "request_prompt_tokens_bucket": {"model_name", "le"},
        "request_generation_tokens_bucket": {"model_name", "le"},
        "request_success_total": {"model_name", "finished_reason"},
        "request_queue_time_seconds_sum": {"model_name"},
        "request_prefill_time_seconds_sum": {"model_name"},
        "request_decode_time_seconds_sum": {"model_name"},
        "request_max_num_generation_tokens_sum": {"model_name"},
    },
    "dashboards/grafana/performance_statistics.json": {
        "e2e_request_latency_seconds_bucket": {"le"},
        "e2e_request_latency_seconds_sum": set(),
        "e2e_request_latency_seconds_count": set(),
        "time_to_first_token_seconds_bucket": {"le"},
        "time_to_first_token_seconds_sum": set(),
        "time_to_first_token_seconds_count": set(),
        "inter_token_latency_seconds_bucket": {"le"},
        "inter_token_latency_seconds_sum": set(),
        "inter_token_latency_seconds_count": set(),
        "generation_tokens_total": {"model_name"},
        "prompt_tokens_total": set(),
        "iteration_tokens_total_count": set(),
    },
    "dashboards/grafana/query_statistics.json": {
        "request_success_total": {"model_name"},
        "e2e_request_latency_seconds_bucket": {"model_name", "le"},
        "request_prompt_tokens_bucket": {"model_name", "le"},
        "prompt_tokens_total": {"model_name"},
        "generation_tokens_total": {"model_name"},
    },
}


@pytest.fixture
def metrics():
    return EngineMetrics("m", 1000)


def read(metrics, name, **labels):
    """Return the value of one sample."""
    wanted = {"model_name": "m", "engine": "0"} | labels
    values = [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == f"octavo:{name}" and sample.labels == wanted
    ]
    assert len(values) == 1, name
    return values[0]


def test_names(metrics):
    metrics.set_cache_config_info({"block_size": 16, "num_gpu_blocks": 100})
    metrics.record_rejection("queue_full")
    families = {f.name for f in text_string_to_metric_families(metrics.render().decode())}
    families = {f for f in families if not f.endswith("_created")}
    assert families == {f"octavo:{name}" for name in NAMES}
    assert read(metrics, "cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert read(metrics, "admission_rejections_total", reason="queue_full") == 1


def test_sleep_state(metrics):
    states = ("awake", "weights_offloaded", "discard_all")
    for level, expected in ((None, [1, 0, 0]), (0, [0, 0, 0]), (1, [0, 1, 0]), (2, [0, 0, 1])):
        if level is not None:
            metrics.record_sleep_state(level)
        assert [read(metrics, "engine_sleep_state", sleep_state=s) for s in states] == expected
    metrics.record_sleep_state(None)
    assert read(metrics, "engine_sleep_state", sleep_state="awake") == 1


def samples(metrics):
    """Return the labels' names of each sample, by its name."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_vllms_dashboards_find_their_metrics(dashboard):
    found = samples(EngineMetrics("m", 1000, prefix="vllm"))
    for name, labels in DASHBOARDS[dashboard].items():
        assert labels <= found[f"vllm:{name}"], name


def test_the_prefix_changes_nothing_but_the_names():
    ours, theirs = EngineMetrics("m", 1000), EngineMetrics("m", 1000, prefix="vllm")
    for metrics in (ours, theirs):
        metrics.set_cache_config_info({"block_size": 16})
        metrics.record_rejection("queue_full")
        metrics.watch_processes(lambda: [os.getpid()])
    renamed = {name.replace("octavo:", "vllm:"): labels for name, labels in samples(ours).items()}
    assert samples(theirs) == renamed
    assert not any(name.startswith("octavo:") for name in renamed)


def test_every_metric_has_vllms_labels(metrics):
    metrics.set_cache_config_info({"block_size": 16})
    metrics.record_rejection("queue_full")
    stats = SchedulerStats(num_steps=1, num_drafts=1, num_accepted_tokens_per_pos=[1])
    metrics.record_scheduler_stats(stats)
    for name, labels in samples(metrics).items():
        assert {"model_name", "engine"} <= labels, name


def test_two_instances_do_not_meet(metrics):
    other = EngineMetrics("m", 1000)
    metrics.record_generation_tokens(3)
    assert read(metrics, "generation_tokens_total") == 3
    assert read(other, "generation_tokens_total") == 0


def test_scheduler_stats(metrics):
    def stats(steps, tokens, queries, hits, preemptions):
        metrics.record_scheduler_stats(
            SchedulerStats(
                num_running_reqs=2,
                num_waiting_reqs=steps,
                num_held_reqs=steps - 1,
                kv_cache_usage=0.25,
                prefix_cache_queries=queries,
                prefix_cache_hits=hits,
                num_preemptions=preemptions,
                num_steps=steps,
                num_scheduled_tokens=tokens,
            )
        )

    stats(1, 10, 100, 40, 0)
    stats(2, 14, 150, 40, 1)
    stats(2, 14, 150, 40, 1)
    assert read(metrics, "num_requests_running") == 2
    assert read(metrics, "num_requests_waiting") == 2
    assert read(metrics, "num_requests_waiting_by_reason", reason="capacity") == 1
    assert read(metrics, "num_requests_waiting_by_reason", reason="deferred") == 1
    assert read(metrics, "kv_cache_usage_perc") == 0.25
    assert read(metrics, "prefix_cache_queries_total") == 150
    assert read(metrics, "prefix_cache_hits_total") == 40
    assert read(metrics, "prompt_tokens_cached_by_source_total", source="device") == 40
    assert read(metrics, "num_preemptions_total") == 1
    # A new engine starts at zero: its counts are added.
    stats(1, 5, 30, 10, 0)
    assert read(metrics, "prefix_cache_queries_total") == 180
    assert read(metrics, "num_preemptions_total") == 1
    # The same holds if it has already passed the old one at its first report.
    metrics.engine_restarted()
    stats(7, 70, 500, 0, 2)
    assert read(metrics, "prefix_cache_queries_total") == 680
    assert read(metrics, "num_preemptions_total") == 3


def test_drafts(metrics):
    def stats(steps, drafts, tokens, accepted):
        metrics.record_scheduler_stats(
            SchedulerStats(
                num_steps=steps,
                num_drafts=drafts,
                num_draft_tokens=tokens,
                num_accepted_tokens_per_pos=accepted,
            )
        )

    stats(1, 0, 0, [])
    stats(2, 2, 6, [2, 1])
    stats(3, 3, 9, [3, 1, 1])
    assert read(metrics, "spec_decode_num_drafts_total") == 3
    assert read(metrics, "spec_decode_num_draft_tokens_total") == 9
    assert read(metrics, "spec_decode_num_accepted_tokens_total") == 5
    per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [read(metrics, per_pos, position=str(i)) for i in range(3)] == [3, 1, 1]
    assert read(metrics, "spec_decode_drafting_paused") == 0
    metrics.record_scheduler_stats(SchedulerStats(num_steps=1, drafting_paused=1))  # restarted
    assert read(metrics, "spec_decode_drafting_paused") == 1


def test_loads_of_experts(metrics):
    loads = SchedulerStats(
        num_steps=1,
        num_experts=8,
        expert_tokens=[40, 0, 80],
        most_expert_tokens=[5, 0, 40],
        num_expert_rearrangements=6,
        mean_process_tokens=30.0,
        most_process_tokens=40.0,
    )
    metrics.record_scheduler_stats(loads)
    assert read(metrics, "expert_tokens_total", layer="2") == 80
    assert read(metrics, "expert_max_share", layer="2") == 0.5
    assert read(metrics, "expert_balancedness", layer="0") == 1.0
    assert read(metrics, "expert_balancedness", layer="2") == 0.25
    assert read(metrics, "eplb_balancedness") == 0.75
    assert read(metrics, "eplb_rearrangements_total") == 6
    assert 'layer="1"' not in metrics.render().decode()  # it has no experts


def test_tokens_of_a_step(metrics):
    metrics.record_first_token(3.0, 50, 20)
    metrics.record_first_token(3.0, 8, 0)
    metrics.record_generation_tokens(5)
    assert read(metrics, "iteration_tokens_total_count") == 1
    assert read(metrics, "iteration_tokens_total_sum") == 30 + 8 + 5
    metrics.record_generation_tokens(5)
    assert read(metrics, "iteration_tokens_total_count") == 2
    assert read(metrics, "iteration_tokens_total_sum") == 48


def test_a_requests_times(metrics):
    times = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=11.0,
        first_token_time=13.0,
        last_token_time=17.0,
        finished_time=18.0,
        num_preemptions=3,
    )
    metrics.record_first_token(3.0, 50, 20)
    metrics.record_inter_token_latencies([1.0, 3.0])
    metrics.record_finished(
        FinishReason.LENGTH,
        times,
        num_prompt_tokens=50,
        num_cached_tokens=20,
        num_generation_tokens=5,
        max_tokens=5,
    )
    metrics.record_all_finished(2, 7)
    expected = {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 4,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 6,
        "request_time_per_output_token_seconds": 1,
        "e2e_request_latency_seconds": 8,
        "request_prompt_tokens": 50,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 5,
        "request_params_n": 2,
        "request_max_num_generation_tokens": 7,
        "request_prefill_kv_computed_tokens": 30,
        "request_num_preemptions": 3,
    }
    assert {name: read(metrics, f"{name}_sum") for name in expected} == expected
    assert read(metrics, "prompt_tokens_total") == 50
    assert read(metrics, "prompt_tokens_cached_total") == 20
    assert read(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 20
    assert read(metrics, "prompt_tokens_by_source_total", source="local_compute") == 30
    assert read(metrics, "request_success_total", finished_reason="length") == 1
    assert read(metrics, "request_success_total", finished_reason="stop") == 0


def test_a_request_that_never_ran(metrics):
    times = RequestMetrics(arrival_time=10.0, finished_time=12.0)
    metrics.record_finished(
        FinishReason.ABORT,
        times,
        num_prompt_tokens=5,
        num_cached_tokens=0,
        num_generation_tokens=0,
        max_tokens=None,
    )
    assert read(metrics, "requests_aborted_total") == 1
    assert read(metrics, "e2e_request_latency_seconds_sum") == 2
    assert read(metrics, "request_queue_time_seconds_count") == 0
    assert read(metrics, "request_prefill_kv_computed_tokens_count") == 0
    assert read(metrics, "request_params_max_tokens_count") == 0


def test_buckets_reach_the_longest_request(metrics):
    text = metrics.render().decode()
    assert 'octavo:request_prompt_tokens_bucket{engine="0",le="1000.0",model_name="m"}' in text
    assert 'octavo:request_prompt_tokens_bucket{engine="0",le="2000.0",model_name="m"}' not in text


def test_requests_without_preemptions_can_be_told(metrics):
    assert 'octavo:request_num_preemptions_bucket{engine="0",le="0.0"' in metrics.render().decode()


def test_several_engines_are_shown_together(metrics):
    other = metrics.for_engine(1)
    assert other.for_engine(0) is metrics
    assert metrics.for_engine(1) is other
    used = {"num_total_blocks": 10, "kv_cache_usage": 0.5}
    metrics.record_scheduler_stats(SchedulerStats(num_waiting_reqs=2, num_used_blocks=5, **used))
    other.record_scheduler_stats(SchedulerStats(num_waiting_reqs=3, num_used_blocks=0, **used))
    for engine in (metrics, other):
        engine.set_cache_config_info({"block_size": 16})
        engine.watch_processes(lambda: [os.getpid()])
    assert read(metrics, "num_requests_waiting") == 2
    assert read(metrics, "num_requests_waiting", engine="1") == 3
    assert read(metrics, "cache_config_info", engine="1", block_size="16") == 1
    assert metrics.load() == {
        "kv_cache_usage_perc": 0.25,
        "num_requests_running": 0.0,
        "num_requests_waiting": 5.0,
    }
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert len({f.name for f in families}) == len(families)
    (process,) = (f for f in families if f.name == "octavo_engine_process_resident_memory_bytes")
    assert [sample.labels for sample in process.samples] == [{"engine": "0"}, {"engine": "1"}]
    other.record_recovery(2, 0.5)
    assert read(metrics, "num_requests_waiting", engine="1") == 0


def test_the_engine_process_is_watched(metrics):
    metrics.watch_processes(lambda: [os.getpid()])
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    (sample,) = families["octavo_engine_process_resident_memory_bytes"].samples
    assert sample.value > 2**20
    assert "octavo_engine_process_cpu_seconds" in families


def test_an_engine_process_that_is_gone_has_no_memory(metrics):
    metrics.watch_processes(lambda: [2**22 + 1])  # beyond the largest process id
    assert b"octavo_engine" not in metrics.render()


def test_memory_of_workers_is_counted(metrics):
    pids = [os.getpid()]
    metrics.watch_processes(lambda: pids)

    def values():
        families = text_string_to_metric_families(metrics.render().decode())
        return {s.name: s.value for f in families for s in f.samples if "_process_" in s.name}

    alone = values()
    pids.append(os.getppid())
    memory = "octavo_engine_process_resident_memory_bytes"
    start = "octavo_engine_process_start_time_seconds"
    assert values()[memory] > alone[memory]
    assert values()[start] == alone[start]
    pids.append(-1)  # on another machine
    assert values()[start] == alone[start]


def test_an_engine_that_is_removed_is_not_shown_as_it_was(metrics):
    other = metrics.for_engine(1)
    other.set_cache_config_info({"block_size": 16})
    other.watch_processes(lambda: [os.getpid()])
    other.record_scheduler_stats(SchedulerStats(num_waiting_reqs=3, num_preemptions=2, num_steps=5))
    metrics.remove_engine(1)
    metrics.for_engine(1).record_rejection("queue_full")  # a late report
    families = list(text_string_to_metric_families(metrics.render().decode()))
    shown = {(f.type, s.name) for f in families for s in f.samples if s.labels["engine"] == "1"}
    assert shown
    assert not [name for kind, name in shown if kind == "gauge" and not name.endswith("_created")]
    assert read(metrics, "num_preemptions_total", engine="1") == 2
    assert metrics.load()["num_requests_waiting"] == 0
    metrics.add_engine(1)
    metrics.for_engine(1).record_scheduler_stats(SchedulerStats(num_waiting_reqs=1))
    assert read(metrics, "num_requests_waiting", engine="1") == 1


def test_engines_are_numbered_among_those_of_all_servers():
    metrics = EngineMetrics("m", 1000, first_engine=6)
    metrics.record_scheduler_stats(SchedulerStats(num_waiting_reqs=2))
    metrics.for_engine(1).record_scheduler_stats(SchedulerStats(num_waiting_reqs=3))
    assert read(metrics, "num_requests_waiting", engine="6") == 2
    assert read(metrics, "num_requests_waiting", engine="7") == 3
    assert metrics.for_engine(1).for_engine(0) is metrics


def test_pages_of_several_processes_are_one():
    a, b = EngineMetrics("m", 100), EngineMetrics("m", 100)
    for metrics, count in ((a, 3), (b, 40)):
        metrics.record_generation_tokens(count)
        metrics.set_cache_config_info({"block_size": 16})
    a.record_rejection("queue_full")
    a.record_scheduler_stats(SchedulerStats(num_running_reqs=5, kv_cache_usage=0.5))
    page = join_pages([a.render(), b.render()]).decode()
    for line in (
        'octavo:generation_tokens_total{engine="0",model_name="m"} 43.0',
        'octavo:iteration_tokens_total_bucket{engine="0",le="4.0",model_name="m"} 1.0',
        'octavo:iteration_tokens_total_bucket{engine="0",le="64.0",model_name="m"} 2.0',
        'octavo:iteration_tokens_total_sum{engine="0",model_name="m"} 43.0',
        'octavo:admission_rejections_total{engine="0",model_name="m",reason="queue_full"} 1.0',
        'octavo:num_requests_running{engine="0",model_name="m"} 5.0',
        'octavo:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
        'octavo:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0',
        'octavo:cache_config_info{block_size="16",engine="0",model_name="m"} 1.0',
    ):
        assert line in page.splitlines(), line
    alone = text_string_to_metric_families(a.render().decode())
    joined = text_string_to_metric_families(page)
    assert [(f.name, f.type) for f in joined] == [(f.name, f.type) for f in alone]


def test_stats_of_another_process_are_no_counts():
    metrics = EngineMetrics("m", 100)
    metrics.keep_stats(SchedulerStats(num_running_reqs=5, num_preemptions=3))
    assert metrics.load()["num_requests_running"] == 5
    page = metrics.render().decode()
    assert 'octavo:num_preemptions_total{engine="0",model_name="m"} 0.0' in page


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_label_values_are_one_value(name):
    """A label's value adds no line and no metric; readers and joined pages give it back."""
    metrics = EngineMetrics(name, 64)
    metrics.set_cache_config_info({"kind": name})
    metrics.record_rejection(name)
    usual = EngineMetrics("model", 64)
    usual.set_cache_config_info({"kind": "k"})
    usual.record_rejection("k")
    for page, expected in (
        (metrics.render(), usual.render()),
        (join_pages([metrics.render()] * 2), join_pages([usual.render()] * 2)),
    ):
        text = page.decode()
        assert len(text.split("\n")) == len(expected.decode().split("\n"))
        families = list(text_string_to_metric_families(text))
        known = [f.name for f in text_string_to_metric_families(expected.decode())]
        assert [family.name for family in families] == known
        samples = [sample for family in families for sample in family.samples]
        named = [s.labels["model_name"] for s in samples if "model_name" in s.labels]
        assert len(named) > 50
        assert set(named) == {name}
        assert {s.labels["kind"] for s in samples if "kind" in s.labels} == {name}
    read = [m.labels["model_name"] for m in read_metrics(text) if "model_name" in m.labels]
    assert set(read) == {name}
