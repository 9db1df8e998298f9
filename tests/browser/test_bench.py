"""Results of benchmarks in the page: pictures with the figures of --plot, and comparisons."""

import json

import numpy as np
import pytest

from octavo.bench import pictures, plots
from tests.browser.conftest import files_of
from tests.browser.test_page import TUNED, open_results

RNG = np.random.default_rng(7)
UNITS = ("ttft", "tpot")


def detailed(number=40, factor=1.0):
    """Return a result of `octavo bench serve --save-detailed`; the last request failed."""
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


ONE = detailed()
SWEEP = {"runs": [run("a", 1, 10), run("a", 2, 20), run("b", 1, 30), {"label": "c", "error": "x"}]}
KERNEL = {"name": "matmul", "flops": 2e9, "bytes": 1e9, "seconds": 0.1}
LATENCY = {
    "breakdown": {"decode": {"kernels": [KERNEL]}},
    "picture": pictures.roofline([KERNEL], 20e9, 2e12),
}
STARTS = [{"cache": cache, "ready": 1.0 + i} for cache in ("warm", "cold") for i in range(3)]
STARTUP = {"starts": STARTS, "picture": pictures.starts(STARTS, {"ready": "model loaded"})}


@pytest.fixture
def bench(open_page):
    """Return the benchmark view of a new page."""
    page = open_page("/#/bench")
    page.get_by_label("Files").wait_for()
    return page


def rows(page):
    return [row.inner_text().split("\t") for row in page.locator("#bench tbody tr").all()]


def charts(page):
    return page.locator("svg.chart").evaluate_all("all => all.map(one => one.ariaLabel)")


def test_requests(bench):
    open_results(bench, {"one.json": ONE})
    for name, values in plots._latencies(ONE).items():
        short = plots.LATENCIES[name][0]
        texts = bench.locator(f"svg[aria-label^='{short}:'] text").all_text_contents()
        for word, share in (("median", 50), ("p99", 99)):
            assert f" {word} {plots._plain(float(np.percentile(values, share)))} ms " in texts
    # Each of the 39 requests was first waiting, then read, then written; one failed.
    for colour, number in (("c7", 40), ("c2", 39), ("c1", 39)):
        assert bench.locator(f"line.bar.{colour}").count() == number
    assert bench.locator("svg[aria-label^='one.json: timeline'] circle").count() == 1


def test_comparisons(bench):
    open_results(bench, {"one.json": ONE, "two.json": detailed(factor=2.0)})
    assert bench.locator("svg[aria-label^='TTFT:'] path").count() == 2
    assert len(charts(bench)) == 6
    (row,) = [row for row in rows(bench) if row[0] == "output_throughput"]
    assert row[1:] == ["100", "50 \u221250.0 %"]
    bench.get_by_role("button", name="Clear").click()
    assert charts(bench) == []
    assert rows(bench) == []


def test_other_results(bench):
    open_results(bench, {"summary.json": SWEEP, "tune.json": TUNED, "latency.json": LATENCY})
    assert charts(bench) == [
        "TTFT: TTFT (ms) over Output throughput (tokens/s)",
        "TPOT: TPOT (ms) over Output throughput (tokens/s)",
        "tune.json: rate over p99 ttft ms",
        "latency.json: Roofline: Speed (GFLOP/s) over Arithmetic intensity (FLOP/byte)",
    ]
    keys = bench.locator("figcaption").first.inner_text()
    assert "summary.json: a, median" in keys
    assert "summary.json: b, p99" in keys
    assert bench.locator("svg title", has_text="summary.json: a, p99: 60, 20").count() == 2
    assert bench.locator("svg text", has_text="2/s").count() == 2
    found = {name: values for name, *values in rows(bench)}
    assert found["runs 0 output_throughput"] == ["30", "", ""]
    assert found["breakdown decode kernels 0 flops"] == ["", "", "2,000,000,000"]


def test_pictures_that_results_hold(bench):
    open_results(bench, {"startup.json": STARTUP, "latency.json": LATENCY})
    starts, roofline = bench.locator("figure").all()
    assert starts.locator("text", has_text="model loaded").count() == 1
    assert starts.locator("circle.c1").count() == 4  # three starts, and the median
    assert starts.locator("circle.c2.open").count() == 1
    assert "cold file cache, median" in starts.inner_text()
    assert "peak 2000 GFLOP/s" in roofline.inner_text()
    assert "matmul: 20 GFLOP/s, 10 GB/s, 50% of the roof" in roofline.inner_text()
    marks = roofline.locator("text", has_text="memory 20 GB/s; ridge at 100 FLOP/byte")
    assert marks.count() == 1
    assert roofline.locator("path").count() == 1
    names = {row[0] for row in rows(bench)}
    assert "starts 0 ready" in names
    assert not any(name.startswith("picture") for name in names)


def test_files_that_are_no_results(bench):
    open_results(bench, {"a.json": [1]})
    bench.get_by_text("a.json: it is no result").wait_for()
    open_results(bench, {"b.json": {"trials": 3, "slo": {"x": 1}}, "c.json": {"runs": [1, None]}})
    assert bench.get_by_text("A file cannot be drawn").count() == 2
    bench.get_by_role("button", name="Clear").click()
    open_results(bench, {"b.json": {"ttfts": 3, "x": None}})
    assert rows(bench) == [["ttfts", "3"]]
    wrong = {"name": "x.json", "mimeType": "", "buffer": b"{" + json.dumps("x").encode()}
    files_of(bench).set_input_files([wrong])
    bench.get_by_text("x.json: ").wait_for()
