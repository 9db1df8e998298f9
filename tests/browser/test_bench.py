"""Results of benchmarks in the page: the figures are those of --plot."""

import json

import numpy as np
import pytest

from octavo.bench import plots
from tests.browser.test_page import TUNED, open_results

RNG = np.random.default_rng(7)


def detailed(number=40, factor=1.0):
    ttfts = factor * RNG.uniform(0.1, 0.4, number)
    itls = [list(factor * RNG.uniform(0.01, 0.03, 5)) for _ in range(number)]
    return {
        "output_throughput": 100.0 / factor,
        "start_times": list(np.arange(number) * 0.1),
        "scheduled_times": list(np.arange(number) * 0.1 - 0.01),
        "ttfts": [*ttfts[:-1], None],
        "itls": [*itls[:-1], []],
        "e2els": [*(ttfts + [sum(i) for i in itls])[:-1], None],
        "output_lens": [6] * (number - 1) + [0],
        "errors": [None] * (number - 1) + ["failed"],
    }


def run(label, rate, speed):
    latencies = {f"{p}_{unit}_ms": speed for p in ("median", "p90", "p99") for unit in UNITS}
    return {"label": label, "request_rate": rate, "output_throughput": speed * 3} | latencies


UNITS = ("ttft", "tpot")
SWEEP = {"runs": [run("a", 1, 10), run("a", 2, 20), run("b", 1, 30), {"label": "c", "error": "x"}]}
KERNEL = {"name": "matmul", "flops": 2e9, "bytes": 1e9, "gflop_s": 50, "gb_s": 25, "ms": 40}
LATENCY = {
    "breakdown": {"machine": {"peak": 1e11, "bandwidth": 2e10}, "decode": {"kernels": [KERNEL]}}
}
STARTUP = {"starts": [{"cache": "warm", "kind": "llm", "ready": 1.5, "first_token": 2.0, "rss": 7}]}


@pytest.fixture
def bench(open_page):
    """Return the benchmark view of a new page."""
    page = open_page("/#/bench")
    page.get_by_label("Files").wait_for()
    return page


def charts(page):
    return page.locator("svg.chart").evaluate_all("all => all.map(one => one.ariaLabel)")


def test_requests(bench):
    result = detailed()
    open_results(bench, {"one.json": result})
    for name, values in plots._latencies(result).items():
        short = plots.LATENCIES[name][0]
        marks = bench.locator(f"svg[aria-label^='{short}:'] text").all_text_contents()
        for word, share in (("median", 50), ("p99", 99)):
            assert f"{word} {plots._plain(float(np.percentile(values, share)))} ms" in marks
    # Each of the 39 requests was first waiting, then read, then written.
    for part in ("wait", "first", "last"):
        assert bench.locator(f".bar-line.{part}").count() == 39 + (part == "wait")


def test_comparisons(bench):
    open_results(bench, {"one.json": detailed(), "two.json": detailed(factor=2.0)})
    row = bench.get_by_role("row", name="output_throughput")
    assert row.inner_text().split("\t") == ["output_throughput", "100", "50 \u221250.0 %"]
    assert bench.locator("svg[aria-label^='TTFT:'] polyline").count() == 2
    assert len(charts(bench)) == 6
    bench.get_by_role("button", name="Clear").click()
    assert charts(bench) == []


def test_other_results(bench):
    results = {"summary.json": SWEEP, "tune.json": TUNED, "latency.json": LATENCY}
    open_results(bench, results | {"startup.json": STARTUP})
    assert charts(bench) == [
        "TTFT: TTFT (ms) over Output throughput (tokens/s)",
        "TPOT: TPOT (ms) over Output throughput (tokens/s)",
        "tune.json: rate over p99 ttft ms",
        "startup.json: 0 ready, 1 first_token: Moment over Seconds from process start",
        "latency.json: roofline: Speed (GFLOP/s) over Arithmetic intensity (FLOP/byte)",
    ]
    labels = bench.locator(".key").first.inner_text().split("\n")[0]
    assert "summary.json: a, median" in labels
    assert "summary.json: b, p99" in labels
    assert bench.locator("svg title", has_text="summary.json: a, p99 2/s: 60, 20").count() == 2


def test_files_that_are_no_results(bench):
    files = {"a.json": [1], "b.json": {"trials": 3, "slo": {"x": 1}}, "c.json": {"runs": [1, None]}}
    for name, content in files.items():
        open_results(bench, {name: content})
        if name == "a.json":
            bench.get_by_text("a.json: it is no result").wait_for()
    assert bench.get_by_text("A file cannot be drawn").count() == 2
    bench.get_by_role("button", name="Clear").click()
    wrong = {"name": "x.json", "mimeType": "", "buffer": b"{" + json.dumps("x").encode()}
    bench.get_by_label("Files").set_input_files([wrong])
    bench.get_by_text("x.json: ").wait_for()
