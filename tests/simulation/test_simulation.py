"""Simulated engine, with steps of round times."""

import dataclasses

import msgspec
import numpy as np
import pytest

from octavo.bench.datasets import BenchRequest
from octavo.bench.metrics import summarize
from octavo.bench.timeline import Timeline
from octavo.config import EngineConfig
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import SchedulerStats
from octavo.simulation.simulation import SimulatedEngine, simulate
from octavo.simulation.step_times import MeasuredStep, Spread, StepBatch, StepTimes
from tests.fakes import pages

COSTS = ("spread", "host_seconds", "host_request_seconds", "arrival_seconds")
COSTS += ("arrival_token_seconds",)


def engine(num_blocks=100, budget=64, seconds=None, **config):
    costs = {name: config.pop(name) for name in COSTS if name in config}
    times = StepTimes(
        model="m",
        cpu="c",
        num_blocks=num_blocks,
        max_model_len=256,
        seconds=seconds or {"step": 1.0},
        error=0.0,
        **costs,
    )
    return SimulatedEngine(
        EngineConfig.from_kwargs(**config),
        KVCacheConfig(num_blocks, 16, make_kv_cache_groups(pages(None))),
        256,
        budget,
        times,
    )


def request(size, max_tokens, first=1):
    return BenchRequest([first] * size, None, max_tokens)


def test_one_request_takes_its_steps():
    run = simulate(engine(), [request(100, 3)], [5.0])
    (record,) = run.records
    # Two chunks of the prompt, of which the second returns a token.
    assert record.token_times == [7.0, 8.0, 9.0]
    assert (record.ttft, record.tpot, record.num_output_tokens) == (2.0, 1.0, 3)
    assert (run.duration, run.stats.num_steps) == (9.0, 4)


def test_what_comes_during_a_step_waits_for_its_end():
    run = simulate(engine(async_scheduling=False), [request(9, 4), request(9, 1)], [0.0, 1.5])
    assert run.records[0].token_times == [1.0, 2.0, 3.0, 4.0]
    assert run.records[1].token_times == [3.0]
    # With the next step in flight it waits for that, too.
    run = simulate(engine(), [request(9, 4), request(9, 1)], [0.0, 1.5])
    assert run.records[1].token_times == [4.0]


def test_what_the_host_does_hides_behind_the_steps():
    """The first step is an exception; without async scheduling every step adds the host's time."""
    run = simulate(engine(host_seconds=0.25), [request(9, 3)], [0.0])
    assert run.records[0].token_times == [1.25, 2.25, 3.25]
    run = simulate(engine(host_seconds=0.25, async_scheduling=False), [request(9, 3)], [0.0])
    assert run.records[0].token_times == [1.25, 2.5, 3.75]


def test_what_the_host_does_for_each_request():
    """The requests that run when a step is made count."""
    options = {"host_seconds": 0.25, "host_request_seconds": 0.5, "async_scheduling": False}
    run = simulate(engine(**options), [request(9, 2)] * 2, [0.0] * 2)
    assert run.records[0].token_times == [1.25, 3.5]


def test_what_an_arrival_costs():
    run = simulate(
        engine(arrival_seconds=0.5, arrival_token_seconds=0.25), [request(8, 1)] * 2, [0.0, 10.0]
    )
    assert [record.ttft for record in run.records] == [3.5, 3.5]


def test_steps_differ_as_measured_ones_do():
    spread = [Spread(least=0.1, ratios=[9.0]), Spread(least=0.5, ratios=[0.5, 1.0, 1.5])]
    requests = [request(9, 200)]
    run = simulate(engine(spread=spread), requests, [0.0])
    taken = np.diff(run.records[0].token_times)
    assert sorted(set(taken.round(6))) == [0.5, 1.0, 1.5]
    assert 180 < taken.sum() < 220
    again = simulate(engine(spread=spread), requests, [0.0])
    assert again.records[0].token_times == run.records[0].token_times


def test_idle_time_costs_no_steps():
    run = simulate(engine(), [request(9, 2), request(9, 2, first=2)], [0.0, 86_400.0])
    assert run.duration == 86_402.0
    assert run.stats.num_steps == 4


def test_a_shared_prefix_is_found():
    run = simulate(engine(), [request(80, 1), request(80, 1)], [0.0, 10.0])
    assert [record.num_cached_tokens for record in run.records] == [0, 79]
    assert run.records[1].ttft == 1.0
    assert run.stats.prefix_cache_hits == 79
    off = simulate(engine(enable_prefix_caching=False), [request(80, 1)] * 2, [0.0, 10.0])
    assert [record.num_cached_tokens for record in off.records] == [0, 0]


def test_a_small_cache_preempts():
    requests = [request(30, 100, first=i) for i in range(4)]
    run = simulate(engine(num_blocks=12), requests, [0.0] * 4)
    assert run.stats.num_preemptions > 0
    assert run.kv_usage_max > 0.9
    assert [record.num_output_tokens for record in run.records] == [100] * 4
    assert [len(record.token_times) for record in run.records] == [100] * 4
    assert max(run.timeline.waiting) > 0


def test_a_step_takes_what_its_batch_takes():
    seconds = {"step": 1.0, "samples": 10.0, "pairs": 0.01}
    run = simulate(engine(seconds=seconds), [request(8, 2), request(8, 2)], [0.0, 0.0])
    first = 1 + 2 * 10 + 2 * 36 * 0.01
    for record in run.records:
        assert record.token_times == pytest.approx([first, first + 1 + 2 * 10])


def test_ends_are_told():
    ended = []
    simulate(engine(), [request(9, 2)] * 3, [0.0, 1.0, 2.0], lambda: ended.append(1))
    assert len(ended) == 3


def test_a_timeline_stays_small():
    timeline = Timeline()
    for second in range(50_000):
        timeline.note(float(second), SchedulerStats(num_running_reqs=second))
    assert 1000 < len(timeline.times) < 4000
    assert timeline.times == sorted(timeline.times) == list(map(float, timeline.running))
    assert timeline.times[-1] > 49_900


class NoisyTimes(StepTimes):
    """Times of an engine whose steps are delayed now and then."""

    def make_predictor(self):
        return NoisySteps(5)


class NoisySteps:
    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def __call__(self, batch):
        mean = 2e-3 + 2e-5 * batch.num_tokens + 5e-5 * batch.num_samples + 1e-7 * batch.num_reads
        noise = self._rng.gamma(4.0) / 4 * (1 + 0.5 * (batch.num_tokens < 8))
        return mean * noise * (15 if self._rng.random() < 0.01 else 1)


def test_the_tail_is_that_of_an_engine_whose_steps_vary():
    """It was measured on other loads; the same means without a spread would be far off."""
    rng, steps, take = np.random.default_rng(1), [], NoisySteps(2)
    for _ in range(3000):
        decodes, prompt = int(rng.integers(0, 40)), int(rng.choice([0, 0, 0, 10, 64]))
        batch = StepBatch(max(1, decodes + prompt), decodes + 1, int(prompt > 0), decodes * 100)
        steps.append(MeasuredStep(batch, decodes + 1, take(batch), 1e-4))
    plan = {"model": "m", "cpu": "c", "num_blocks": 800, "max_model_len": 256}
    fitted = StepTimes.of_steps(steps, **plan)
    without = msgspec.structs.replace(fitted, spread=[])
    requests = [request(int(rng.integers(5, 120)), int(rng.integers(2, 40))) for _ in range(600)]
    arrivals = np.cumsum(rng.exponential(0.012, 600)).tolist()

    def figures(times):
        made = engine(num_blocks=800, enable_prefix_caching=False)
        run = simulate(dataclasses.replace(made, step_times=times), requests, arrivals)
        return summarize(run.records, run.duration)

    real = figures(NoisyTimes(**plan, seconds={}, error=0.0))
    ours, flat = figures(fitted), figures(without)
    for name, most in (("median", 0.15), ("p99", 0.25)):
        for figure in ("ttft", "tpot"):
            key = f"{name}_{figure}_ms"
            assert ours[key] == pytest.approx(real[key], rel=most), key
    assert flat["p99_tpot_ms"] < 0.75 * real["p99_tpot_ms"]
