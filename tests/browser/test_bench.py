"""Results of benchmarks in the page: their figures, side by side."""

import json

import pytest

from tests.browser.test_page import TUNED, open_results

ONE = {"output_throughput": 100.0, "ttfts": [0.1, 0.2], "itls": [[0.1], []], "errors": [None]}
SWEEP = {"runs": [{"label": "a", "output_throughput": 30.5}, {"label": "b", "error": "x"}]}
KERNEL = {"name": "matmul", "flops": 2e9, "gflop_s": 50}
LATENCY = {"breakdown": {"machine": {"peak": 1e11}, "decode": {"kernels": [KERNEL]}}}


@pytest.fixture
def bench(open_page):
    """Return the benchmark view of a new page."""
    page = open_page("/#/bench")
    page.get_by_label("Files").wait_for()
    return page


def rows(page):
    return [row.inner_text().split("\t") for row in page.locator("#bench tbody tr").all()]


def test_comparisons(bench):
    open_results(bench, {"one.json": ONE, "two.json": {"output_throughput": 50.0, "duration": 2}})
    assert bench.get_by_role("columnheader").all_inner_texts() == ["figure", "one.json", "two.json"]
    assert rows(bench) == [
        ["output_throughput", "100", "50 \u221250.0 %"],
        ["duration", "", "2"],
    ]
    bench.get_by_role("button", name="Clear").click()
    assert rows(bench) == []


def test_figures_within_lists_and_objects(bench):
    open_results(bench, {"sweep.json": SWEEP, "tune.json": TUNED, "latency.json": LATENCY})
    found = {name: values for name, *values in rows(bench)}
    assert found["runs 0 output_throughput"] == ["30.5", "", ""]
    assert found["trials 1 figures rate"] == ["", "3", ""]
    assert found["breakdown decode kernels 0 flops"] == ["", "", "2,000,000,000"]


def test_files_that_are_no_results(bench):
    open_results(bench, {"a.json": [1]})
    bench.get_by_text("a.json: it is no result").wait_for()
    open_results(bench, {"b.json": {"ttfts": 3, "runs": [1, None], "x": None}})
    assert rows(bench) == [["ttfts", "3"]]
    wrong = {"name": "x.json", "mimeType": "", "buffer": b"{" + json.dumps("x").encode()}
    bench.get_by_label("Files").set_input_files([wrong])
    bench.get_by_text("x.json: ").wait_for()
