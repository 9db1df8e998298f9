"""Plots: the right data are drawn, into files that are written whole or not at all."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from octavo.bench import plots, results
from octavo.errors import BenchError

SERVED = {
    "model_id": "/models/toy",
    "request_rate": "inf",
    "start_times": [0.0, 0.1, 0.5, 0.2],
    "scheduled_times": [0.0, 0.1, 0.2, 0.15],
    "ttfts": [0.1, 0.2, 0.1, None],
    "itls": [[0.1, 0.3], [], [0.2], []],
    "output_lens": [5, 1, 3, 0],
    "errors": [None, None, None, "HTTP 500"],
}


@pytest.fixture
def figures(monkeypatch):
    """Return the saved figures."""
    saved = []
    save = Figure.savefig

    def spy(self, *args, **kwargs):
        saved.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return saved


def run(label, rate, throughput, **figures):
    return {"label": label, "request_rate": rate, "output_throughput": throughput, **figures}


RUNS = [
    run("a", 4, 90.0, median_ttft_ms=5.0, p9_ttft_ms=6.0, p99_ttft_ms=9.0, median_tpot_ms=None),
    run("a", 1, 30.0, median_ttft_ms=4.0, p9_ttft_ms=5.0, p99_ttft_ms=7.0, median_tpot_ms=0.0),
    run("a", "inf", 95.0, median_ttft_ms=50.0, p9_ttft_ms=50, p99_ttft_ms=70.0, median_tpot_ms=1.0),
    run("b", 1, 31.0, median_ttft_ms=2.0, p9_ttft_ms=2.0, p99_ttft_ms=3.0, median_tpot_ms=1.0),
    {"label": "b", "request_rate": 4, "error": "failed"},
]
POINTS = [
    {"name": "qkv", "flops": 4e9, "bytes": 4e9, "seconds": 0.1},
    {"name": "mlp", "flops": 4e12, "bytes": 8e9, "seconds": 2.0},
]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("SVG", b"<?xml")])
def test_files(suffix, magic, tmp_path):
    path = tmp_path / "new" / f"picture.{suffix}"
    plots.requests(SERVED, path)
    assert path.read_bytes().startswith(magic)
    plots.throughput_latency(RUNS, path)
    plots.roofline(POINTS, 45e9, 2e12, path)
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_drawing_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plots.roofline(POINTS, 45e9, 2e12, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


def bars(ax):
    """Return the segments of the timeline by label: (row, begin, end)."""
    return {
        collection.get_label(): [
            (int(s[0][1]), *np.round(s[:, 0], 6).tolist()) for s in collection.get_segments()
        ]
        for collection in ax.collections
    }


def test_timeline(figures, tmp_path):
    plots.requests(SERVED, tmp_path / "a.png")
    ax = figures[0].axes[0]
    assert bars(ax) == {
        "waiting in the client": [(3, 0.2, 0.5), (2, 0.15, 0.2)],
        "until the first token": [(0, 0.0, 0.1), (1, 0.1, 0.3), (3, 0.5, 0.6)],
        "until the last token": [(0, 0.1, 0.5), (3, 0.6, 0.8)],
    }
    (failed,) = ax.get_lines()
    assert (failed.get_xdata().tolist(), failed.get_ydata().tolist()) == ([0.2], [2.0])
    assert figures[0].get_suptitle() == "toy: 4 requests, all at once"
    for ax in figures[0].axes:
        assert "(s)" in ax.get_xlabel() or "(ms)" in ax.get_xlabel()


def test_distributions(figures, tmp_path):
    plots.requests(SERVED, tmp_path / "a.png")
    curves = {ax.get_title(): ax.get_lines()[0].get_xdata() for ax in figures[0].axes[1:]}
    assert curves["TTFT"][1:] == pytest.approx([100, 100, 200])
    assert curves["TPOT"][1:] == pytest.approx([100, 100])  # (0.1 + 0.3) / 4 and 0.2 / 2
    assert curves["ITL"][1:] == pytest.approx([100, 200, 300])
    assert curves["E2EL"][1:] == pytest.approx([200, 300, 500])
    assert [ax.get_xlim()[0] for ax in figures[0].axes[1:]] == pytest.approx([100, 100, 100, 200])
    shares = figures[0].axes[1].get_lines()[0].get_ydata()
    assert shares == pytest.approx([0, 100 / 3, 200 / 3, 100])


def test_outliers_make_the_axis_logarithmic(figures, tmp_path):
    itls = [[0.0, *[0.001] * 50, 5.0]]
    served = {"start_times": [0], "ttfts": [0.1], "itls": itls, "output_lens": [53]}
    plots.requests(served, tmp_path / "a.png")
    assert [ax.get_xscale() for ax in figures[0].axes[1:]] == ["linear", "linear", "log", "linear"]
    assert figures[0].axes[3].get_xlim()[0] == pytest.approx(1.0)


def test_a_median_of_0_on_a_logarithmic_axis(figures, tmp_path):
    itls = [[*[0.0] * 9, 0.002, 5.0]]
    served = {"start_times": [0], "ttfts": [12.5], "itls": itls, "output_lens": [12]}
    plots.requests(served, tmp_path / "a.png")
    ttft, _, itl, _ = figures[0].axes[1:]
    _, median, _ = itl.get_lines()
    assert median.get_xdata()[0] == itl.get_xlim()[0] == pytest.approx(2.0)
    assert [t.get_text() for t in ttft.get_legend().get_texts()] == [
        "median 12,500 ms",
        "p99 12,500 ms",
    ]
    assert figures[0].get_suptitle().endswith(": 1 request, all at once")


def test_nothing_measured(tmp_path):
    nothing = {"start_times": [], "ttfts": [], "itls": [], "output_lens": []}
    plots.requests(nothing, tmp_path / "a.png")
    failed = {"start_times": [0], "ttfts": [None], "itls": [[]], "output_lens": [0]}
    plots.requests(failed | {"errors": ["oops"]}, tmp_path / "b.png")
    assert len(os.listdir(tmp_path)) == 2


def test_throughput_and_latency(figures, tmp_path):
    plots.throughput_latency(RUNS, tmp_path / "a.png")
    ttft, tpot = figures[0].axes
    lines = [(list(x.get_xdata()), list(x.get_ydata())) for x in ttft.get_lines()]
    assert ([30.0, 90.0, 95.0], [4.0, 5.0, 50.0]) in lines
    assert ([30.0, 90.0, 95.0], [7.0, 9.0, 70.0]) in lines
    assert ([31.0], [3.0]) in lines
    assert {t.get_text() for t in ttft.texts} == {"1/s", "4/s", "all at once"}
    labels = [t.get_text() for t in figures[0].legends[0].get_texts()]
    assert labels == ["a", "b", "median", "p99"]
    # Missing measurements and 0 are absent from a logarithmic axis.
    assert [math.isnan(y) for y in tpot.get_lines()[0].get_ydata()] == [True, True, False]


def test_nothing_covers_data(figures, tmp_path):
    """Data stay visible next to the rates of the points and the legend."""
    runs = [
        run("a", rate, 100.0 + rate, median_ttft_ms=5.0 + rate, p99_ttft_ms=9.0 + rate / 9)
        for rate in range(1, 40)
    ]
    plots.throughput_latency(runs, tmp_path / "a.png")
    plots.requests(SERVED, tmp_path / "b.png")
    ttft, _ = figures[0].axes
    boxes = [text.get_window_extent() for text in ttft.texts]
    assert 3 < len(boxes) < len(runs)  # those without room are left out
    for i, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:i])
        for line in ttft.get_lines():
            path = line.get_transform().transform_path(line.get_path())
            assert not len(path.vertices) or not path.intersects_bbox(box, filled=False)
    for figure in figures:
        legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes)]
        for legend in filter(None, legends):
            assert not legend.get_window_extent().count_overlaps([a.bbox for a in figure.axes])


def test_requests_whose_single_tokens_are_not_known(figures, tmp_path):
    known = {name: SERVED[name] for name in ("start_times", "ttfts", "output_lens", "errors")}
    plots.requests(known | {"e2els": [0.5, 0.2, 0.3, None]}, tmp_path / "a.png")
    *_, tpot, itl, e2el = figures[0].axes
    assert max(e2el.get_lines()[0].get_xdata()) == pytest.approx(500)
    assert max(tpot.get_lines()[0].get_xdata()) == pytest.approx(100)  # (0.5 - 0.1) s for 4
    assert [t.get_text() for t in itl.texts] == ["not measured"]


def test_trials(figures, tmp_path):
    def trial(budget, latency, throughput):
        figures = {"p99_ttft_ms": latency, "output_throughput": throughput}
        return {"budget": budget, "figures": figures}

    found = [trial(20, 30.0, 100.0), trial(20, 90.0, 300.0), trial(60, 40.0, 200.0)]
    found.append({"budget": 20, "figures": {}})  # its server failed
    result = {"objective": "output_throughput", "slo": {"p99_ttft_ms": 50.0}, "trials": found}
    plots.trials(result | {"winner": found[2], "default": None}, tmp_path / "a.png")
    lines = {x.get_label(): list(x.get_xdata()) for x in figures[0].axes[0].get_lines()}
    assert lines == {
        "20 requests": [30.0, 90.0],
        "60 requests": [40.0],
        "best": [40.0],
        "limit": [50.0, 50.0],
    }


def test_starts(figures, tmp_path):
    measured = [{"cache": "warm", "import": 0.2, "ready": 0.9}, {"cache": "cold", "import": 0.4}]
    labels = {"import": "imported", "ready": "loaded", "never": "never"}
    plots.starts(measured, labels, tmp_path / "a.png")
    (ax,) = figures[0].axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["imported", "loaded"]
    assert [list(line.get_xdata()) for line in ax.get_lines()] == [[0.2], [0.9], [0.4]]


def test_roofline(figures, tmp_path):
    plots.roofline(POINTS, 50e9, 2e12, tmp_path / "a.svg")
    ax = figures[0].axes[0]
    roof = ax.get_lines()[0]
    assert roof.get_ydata().max() == pytest.approx(2000)
    x, y = roof.get_xdata()[0], roof.get_ydata()[0]
    assert y == pytest.approx(x * 50)
    qkv = next(x for x in ax.get_lines() if x.get_label().startswith("qkv"))
    assert (qkv.get_xdata()[0], qkv.get_ydata()[0]) == pytest.approx((1.0, 40.0))
    assert qkv.get_label() == "qkv: 40 GFLOP/s, 40 GB/s, 80% of the roof"
    assert "FLOP/byte" in ax.get_xlabel()
    assert "GFLOP/s" in ax.get_ylabel()


def test_no_point_lies_above_the_roof(figures, tmp_path):
    plots.roofline(POINTS, 1e9, 1e12, tmp_path / "a.png")  # both limits are measured too low
    roof, *_ = figures[0].axes[0].get_lines()
    x, y = roof.get_xdata(), roof.get_ydata()
    for point in POINTS:
        intensity = point["flops"] / point["bytes"]
        speed = point["flops"] / point["seconds"] / 1e9
        assert speed <= np.interp(intensity, x, y) * 1.01
    assert y.max() == pytest.approx(2000)


def test_no_legend_of_one(figures, tmp_path):
    plots.throughput_latency(RUNS[:3], tmp_path / "a.png")
    labels = [t.get_text() for t in figures[0].legends[0].get_texts()]
    assert labels == ["median", "p99"]
    assert figures[0].get_suptitle() == "a"
    plots.throughput_latency([run("a", 1, 30.0, median_ttft_ms=4.0)], tmp_path / "a.png")
    assert figures[1].legends == []
    plots.roofline(POINTS[:1], 45e9, 2e12, tmp_path / "a.png")
    assert figures[2].legends == []
    assert figures[2].axes[0].get_title().startswith("qkv: 40 GFLOP/s")


@pytest.mark.parametrize(
    ("low", "high", "some"),
    [
        (6.0, 9.0, {"7", "8"}),
        (0.5, 20.0, {"0.5", "1", "2", "5", "10", "20"}),
        (0.01, 5e6, {"0.1", "1,000", "1,000,000"}),
    ],
)
def test_numbers_are_plain(low, high, some):
    figure = plots._new_figure(6, 4)
    ax = figure.subplots()
    ax.set(yscale="log", ylim=(low, high))
    plots._plain_numbers(ax.yaxis)
    figure.canvas.draw()
    shown = {t.get_text() for t in ax.get_yticklabels(which="both")}
    assert some <= shown
    assert not any("$" in text or "e" in text for text in shown)


def test_nothing_is_cut_off(figures, tmp_path):
    long = "a long name of settings, " * 3
    runs = [r | {"label": f"{long}{r['label']}"} for r in RUNS]
    plots.throughput_latency(runs, tmp_path / "a.png")
    points = [p | {"name": f"prefill: {p['name']} of a long name"} for p in POINTS]
    plots.roofline(points, 1e8, 2e12, tmp_path / "a.png")
    for figure in figures:
        figure.canvas.draw()
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert box.x0 >= -0.01
        assert box.y0 >= -0.01
        assert box.x1 <= width + 0.01
        assert box.y1 <= height + 0.01


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: plots.requests({"ttfts": []}, p), "no start_times; save it with --save-detail"),
        (lambda p: plots.throughput_latency(RUNS[-1:], p), "no successful run"),
        (lambda p: plots.roofline([], 1.0, 1.0, p), "without points"),
        (lambda p: plots.roofline(POINTS, 0, 1.0, p), "bandwidth is 0; must be"),
        (lambda p: plots.roofline(POINTS, 1.0, math.inf, p), "peak is inf"),
        (lambda p: plots.roofline([POINTS[0] | {"bytes": 0}], 1, 1, p), "bytes of 'qkv' is 0"),
        (lambda p: plots.roofline([{"name": "x"}], 1, 1, p), "flops of 'x' is None"),
    ],
)
def test_nothing_to_draw(draw, message, tmp_path):
    with pytest.raises(BenchError, match=message):
        draw(tmp_path / "a.png")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a.jpg", "a", "png"])
def test_other_formats(name):
    with pytest.raises(BenchError, match=rf"--plot {name}: must end in \.png or \.svg"):
        plots.check(name)


def test_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchError, match=r"pip install matplotlib"):
        plots.check("a.png")


def test_matplotlib_is_imported_only_if_asked_for():
    code = (
        "import sys\nimport octavo.bench.plots, octavo.bench.sweep, octavo.bench.tune\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
