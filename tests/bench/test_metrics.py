"""Figures of a run, against hand-computed ones."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from octavo.bench.metrics import (
    RequestRecord,
    is_good,
    parse_goodput,
    print_summary,
    summarize,
)
from octavo.errors import ConfigError


def record(start=0.0, times=(), tokens=None, prompt=10, error=None, cached=0):
    times = list(times)
    tokens = len(times) if tokens is None else tokens
    return RequestRecord(prompt, tokens, start, start, times, error, num_cached_tokens=cached)


# Sent at 1 s; tokens at 1.5, 1.6, 1.8 s.
THREE = record(1.0, [1.5, 1.6, 1.8], cached=4)
# Four tokens in two arrivals.
GROUPED = record(2.0, [2.25, 2.75], tokens=4)
ONE = record(0.0, [0.25])
FAILED = record(0.0, [0.1, 0.2], error="HTTP 500")


def test_latencies_of_a_record():
    assert THREE.ttft == pytest.approx(0.5)
    assert THREE.tpot == pytest.approx(0.15)
    assert THREE.itls == pytest.approx([0.1, 0.2])
    assert THREE.e2el == pytest.approx(0.8)


def test_tokens_that_come_together_are_one_pause():
    assert GROUPED.itls == pytest.approx([0.5])
    assert GROUPED.tpot == pytest.approx(0.5 / 3)


def test_one_token_has_no_tpot_and_no_token_nothing():
    assert math.isnan(ONE.tpot)
    assert ONE.itls == []
    nothing = record(3.0)
    assert all(map(math.isnan, (nothing.ttft, nothing.tpot, nothing.e2el)))
    assert nothing.end_time == 3.0


def test_summary():
    summary = summarize([THREE, GROUPED, ONE, FAILED], 4.0, percentiles=[50, 99.9])
    assert summary["completed"] == 3
    assert summary["failed"] == 1
    assert summary["total_input_tokens"] == 30
    assert summary["total_output_tokens"] == 8
    assert summary["cached_tokens"] == 4
    assert summary["request_throughput"] == pytest.approx(0.75)
    assert summary["output_throughput"] == pytest.approx(2)
    assert summary["total_token_throughput"] == pytest.approx(9.5)
    assert summary["max_concurrent_requests"] == 1
    assert summary["max_output_tokens_per_s"] == pytest.approx(4)
    assert summary["mean_ttft_ms"] == pytest.approx(1000 / 3)
    assert summary["median_ttft_ms"] == summary["p50_ttft_ms"] == pytest.approx(250)
    assert summary["mean_tpot_ms"] == pytest.approx((150 + 500 / 3) / 2)
    assert summary["mean_itl_ms"] == pytest.approx(800 / 3)
    assert summary["p99.9_e2el_ms"] == pytest.approx(799.9, abs=0.05)
    assert summary["std_e2el_ms"] == pytest.approx(248.32774)
    assert "request_goodput" not in summary


def test_without_a_success_there_are_no_latencies():
    summary = summarize([FAILED], 1.0, goodput={"ttft": 1e9})
    assert summary["completed"] == summary["request_goodput"] == summary["output_throughput"] == 0
    assert math.isnan(summary["p99_ttft_ms"])
    assert math.isnan(summary["mean_itl_ms"])
    assert summarize([], 0.0)["max_concurrent_requests"] == 0


def test_goodput():
    levels = {"ttft": 400.0, "tpot": 160.0}
    assert [is_good(r, levels) for r in (THREE, GROUPED, ONE, FAILED)] == [
        False,
        False,
        True,
        False,
    ]
    assert is_good(GROUPED, {"e2el": 750.0})
    summary = summarize([THREE, GROUPED, ONE, FAILED], 4.0, goodput={"e2el": 760.0})
    assert summary["request_goodput"] == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 10)).map(lambda p: (p[0], p[0] + p[1])),
        max_size=12,
    )
)
def test_concurrency_is_the_most_requests_at_one_moment(spans):
    records = [record(float(begin), [float(end)]) for begin, end in spans]
    counts = [sum(b <= t < e for b, e in spans) for t in range(31)]
    assert summarize(records, 40.0)["max_concurrent_requests"] == max(counts)


@pytest.mark.parametrize(
    "value",
    [
        "ttft:200,tpot:50,e2el:5000",
        ["ttft:200", "tpot:50", "e2el:5e3"],
        "ttft:200 tpot:50,e2el:5000",
    ],
)
def test_parse_goodput(value):
    assert parse_goodput(value) == {"ttft": 200.0, "tpot": 50.0, "e2el": 5000.0}


@pytest.mark.parametrize(
    "value",
    ["", "itl:5", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:inf", "ttft:1,ttft:2", "=:"],
)
def test_wrong_goodput(value):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput(value)


def test_print_summary():
    summary = summarize([THREE, GROUPED, ONE], 4.0, percentiles=[99], goodput={"ttft": 300})
    out = io.StringIO()
    print_summary(summary | {"max_concurrency": None}, console=Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                             3" in lines
    assert "Request goodput (req/s):                      0.50" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "P99 ITL (ms):                               494.00" in lines
    assert not any("E2EL" in line or "concurrency:" in line for line in lines)
    assert {len(line) for line in lines} == {50}


def test_years_between_two_tokens():
    """A trace with such times needs no memory for them."""
    summary = summarize([record(times=[1.0, 1.5]), record(times=[1e18])], 1.0)
    assert summary["max_output_tokens_per_s"] == 2
