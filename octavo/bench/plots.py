"""Pictures of results, as PNG or SVG. matplotlib is imported when one is asked for.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which readers of every colour
vision can tell apart; series differ in their markers, too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from octavo.bench import results
from octavo.bench.metrics import LATENCIES, RequestRecord
from octavo.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    from octavo.bench.simulation import Timeline

_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", _RED, "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#999999"
_FORMATS = (".png", ".svg")
_MOST_LABEL = 60
"""Letters of an entry of which two fit side by side."""


def check(path: str | Path) -> None:
    """Tells before a long run whether its picture could be drawn.

    Raises:
        BenchError: matplotlib is missing, or the file is neither PNG nor SVG.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise BenchError(f"--plot {path}: must end in {' or '.join(_FORMATS)}.")
    try:
        import matplotlib.figure  # noqa: F401  # is it there?
    except ImportError:
        raise BenchError(
            "Plots need matplotlib, which is not installed; install it with "
            "`pip install octavo[bench]`."
        ) from None


def requests(result: Mapping[str, Any], path: str | Path) -> None:
    """Draws the timeline of a serving benchmark's requests, and how its latencies are distributed.

    Args:
        result: of `octavo.bench.serve`, with each request's figures.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`; or the result has no figures of requests.
    """
    check(path)
    missing = [n for n in ("start_times", "ttfts", "itls", "output_lens") if n not in result]
    if missing:
        raise BenchError(
            f"The result has no {missing[0]}; save it with --save-detailed to draw its requests."
        )
    figure = _new_figure(11, 8)
    names = list(LATENCIES)
    layout: list[Any] = [["timeline"] * len(names), names]
    axes = figure.subplot_mosaic(layout, height_ratios=(3, 2))
    _timeline(axes["timeline"], result)
    for name, values in _latencies(result).items():
        _distribution(axes[name], name, values)
    axes[names[0]].set_ylabel("Share at or below (%)")
    model = str(result.get("model_id", "")).rstrip("/").rpartition("/")[2]
    count = len(result["ttfts"])
    plural = "" if count == 1 else "s"
    figure.suptitle(f"{model}: {count:,} request{plural}, {_shown_rate(result)}")
    _save(figure, path)


def throughput_latency(runs: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draws TTFT and TPOT (median, and the highest percentile there is) over throughput.

    Args:
        runs: of a sweep's summary; those with the same `label` make up a line, those without
            `output_throughput` (failed ones) are left out.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`; or no run has figures.
    """
    check(path)
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run.get("output_throughput") is not None:
            lines.setdefault(str(run["label"]), []).append(run)
    if not lines:
        raise BenchError("There is no successful run to draw.")
    from matplotlib.patheffects import Normal, Stroke

    figure = _new_figure(11, 5)
    for ax, name in zip(figure.subplots(1, 2), ("ttft", "tpot"), strict=True):
        tail = _highest_percentile(next(iter(lines.values()))[0], name)
        for i, (label, points) in enumerate(lines.items()):
            points = sorted(points, key=lambda p: (_rate(p), p["output_throughput"]))
            colour, marker = _look(i)
            x = [p["output_throughput"] for p in points]
            for key, style, fill in ((f"median_{name}_ms", "--", "white"), (tail, "-", colour)):
                if key is None:
                    continue
                y = [_positive(p.get(key)) for p in points]
                ax.plot(x, y, style, color=colour, marker=marker, mfc=fill)
            if tail is not None:
                for p in points:
                    y_tail = _positive(p.get(tail))
                    if math.isfinite(y_tail):
                        ax.annotate(
                            _shown_rate(p),
                            (p["output_throughput"], y_tail),
                            xytext=(0, 6),
                            textcoords="offset points",
                            ha="center",
                            fontsize=7,
                            path_effects=[Stroke(linewidth=2, foreground="white"), Normal()],
                        )
            if len(lines) > 1:
                ax.plot([], [], "-", color=colour, marker=marker, label=label)
        ax.plot([], [], "--", color=_GREY, marker="o", mfc="white", label="median")
        if tail is not None:
            ax.plot([], [], "-", color=_GREY, marker="o", label=tail.split("_")[0])
        ax.set(
            xlabel="Output throughput (tokens/s)",
            ylabel=f"{LATENCIES[name][0]} (ms)",
            title=LATENCIES[name][1],
            yscale="log",
        )
        ax.margins(x=0.12, y=0.12)
        ax.set_xlim(left=0)
        _plain_numbers(ax.yaxis)
        ax.grid(which="both", color="#e5e5e5")
    if len(lines) == 1:
        label = next(iter(lines))
        figure.suptitle("default settings" if label == "default" else label)
    _legend(figure.axes[0])
    _save(figure, path)


def roofline(
    points: Sequence[Mapping[str, Any]], bandwidth: float, peak: float, path: str | Path
) -> None:
    """Draws measured operations under the roof that memory and arithmetic set.

    The model is that of Williams, Waterman and Patterson ("Roofline", 2009): an operation of
    intensity I (operations a byte) reaches at most min(peak, I * bandwidth).

    Args:
        points: dicts of name, flops (floating-point operations), bytes (moved) and seconds. What
            does no arithmetic has no place here.
        bandwidth: of the memory, in bytes a second, as measured; what a point reached counts, too.
        peak: of the arithmetic, in floating-point operations a second, likewise.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`; or a number is not above 0.
    """
    check(path)
    if not points:
        raise BenchError("A roofline without points; give at least one.")
    for name, value in (("bandwidth", bandwidth), ("peak", peak)):
        _check_positive(name, value)
    for point in points:
        for key in ("flops", "bytes", "seconds"):
            _check_positive(f"{key} of {point.get('name')!r}", point.get(key))
    figure = _new_figure(10, 6)
    ax = figure.subplots()
    # What a point has reached, the machine can do: no measurement of it says less.
    peak = max(peak, *(p["flops"] / p["seconds"] for p in points))
    bandwidth = max(bandwidth, *(p["bytes"] / p["seconds"] for p in points))
    ridge = peak / bandwidth
    intensities = [p["flops"] / p["bytes"] for p in points]
    left, right = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    x = np.geomspace(left, right, 200)
    ax.plot(x, np.minimum(peak, x * bandwidth) / 1e9, color="black")
    ax.axvline(ridge, color=_GREY, linestyle=":", zorder=0)
    ax.text(right, peak / 1e9 * 1.1, f"peak {peak / 1e9:.4g} GFLOP/s", fontsize=9, ha="right")
    ax.annotate(
        f"memory {bandwidth / 1e9:.4g} GB/s; ridge at {ridge:.3g} FLOP/byte",
        (ridge, 0),
        xycoords=("data", "axes fraction"),
        # Towards the side with more room, so that it is not cut off.
        xytext=(4, 6) if ridge**2 < left * right else (-4, 6),
        ha="left" if ridge**2 < left * right else "right",
        textcoords="offset points",
        fontsize=9,
    )
    for i, (point, intensity) in enumerate(zip(points, intensities, strict=True)):
        colour, marker = _look(i)
        speed = point["flops"] / point["seconds"]
        share = speed / min(peak, intensity * bandwidth)
        ax.plot(
            intensity,
            speed / 1e9,
            marker,
            color=colour,
            markersize=9,
            label=f"{point['name']}: {speed / 1e9:.4g} GFLOP/s, "
            f"{point['bytes'] / point['seconds'] / 1e9:.4g} GB/s, {share:.0%} of the roof",
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="Arithmetic intensity (FLOP/byte)",
        ylabel="Speed (GFLOP/s)",
        title="Roofline",
    )
    ax.set_ylim(top=peak / 1e9 * 2)
    _plain_numbers(ax.xaxis)
    _plain_numbers(ax.yaxis)
    ax.grid(which="both", color="#e5e5e5")
    _, labels = ax.get_legend_handles_labels()
    if len(labels) == 1:
        ax.set_title(labels[0])
    else:
        columns = 1 if max(map(len, labels)) > _MOST_LABEL else 2
        figure.legend(loc="outside lower center", fontsize=8, ncols=columns)
    _save(figure, path)


def simulation(timeline: Timeline, records: Sequence[RequestRecord], path: str | Path) -> None:
    """Draws a simulated engine over time: requests, KV cache, and the TTFT of who came when.

    Args:
        timeline: of the engine.
        records: of the requests.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`.
    """
    check(path)
    figure = _new_figure(11, 8)
    queue, cache, ttft = figure.subplots(3, 1, sharex=True)
    unit, name = _time_unit(timeline.times[-1])
    times = np.asarray(timeline.times) / unit
    queue.step(times, timeline.waiting, where="post", color=_ORANGE, label="waiting")
    queue.step(times, timeline.running, where="post", color=_BLUE, label="running")
    queue.set(ylabel="Requests", title=f"{len(records):,} requests, simulated")
    queue.legend(loc="upper right", fontsize=8)
    cache.step(times, np.asarray(timeline.kv_usage) * 100, where="post", color=_GREEN)
    cache.set(ylabel="KV blocks in use (%)", ylim=(0, 105))
    good = [r for r in records if r.error is None]
    ttft.plot(
        [r.start_time / unit for r in good],
        [_positive(r.ttft * 1000) for r in good],
        ".",
        color=_BLUE,
        markersize=3,
        rasterized=True,
    )
    ttft.set(ylabel="TTFT (ms)", xlabel=f"Time of arrival ({name})", yscale="log")
    _plain_numbers(ttft.yaxis)
    for ax in (queue, cache, ttft):
        ax.grid(color="#e5e5e5")
        ax.set_xlim(left=0)
    _save(figure, path)


def _time_unit(seconds: float) -> tuple[float, str]:
    """What to count a span in: seconds of it, and its name."""
    return (1.0, "s") if seconds < 600 else (60.0, "min") if seconds < 36000 else (3600.0, "h")


def _timeline(ax: Axes, result: Mapping[str, Any]) -> None:
    """A bar a request: waiting in the client, until the first token, until the last one."""
    from matplotlib.ticker import MaxNLocator

    start = np.asarray(result["start_times"], np.float64)
    scheduled = np.asarray(result.get("scheduled_times", start), np.float64)
    first = start + _numbers(result["ttfts"])
    last = first + np.asarray([sum(itls) for itls in result["itls"]])
    order = np.argsort(scheduled, kind="stable")
    rows = np.empty(len(order))
    rows[order] = np.arange(len(order))
    # As high as a row, with a hair of space between as long as there is room for one.
    height = ax.figure.bbox.height / ax.figure.dpi * 72 * 0.5
    pitch = height / max(len(order), 1)
    width = min(12.0, pitch * (0.8 if pitch > 3 else 1.2))
    parts = (
        ("waiting in the client", scheduled, start, "#cccccc"),
        ("until the first token", start, first, _ORANGE),
        ("until the last token", first, last, _BLUE),
    )
    for label, begin, end, colour in parts:
        shown = end > begin
        if shown.any():
            ax.hlines(
                rows[shown], begin[shown], end[shown], colors=colour, linewidth=width, label=label
            )
    failed = np.asarray([e is not None for e in result.get("errors", [None] * len(order))], bool)
    if failed.any():
        ax.plot(start[failed], rows[failed], "x", color=_RED, label="failed")
    ax.set(xlabel="Time (s)", ylabel="Request, in the order of arrival", title="Timeline")
    ax.set_ylim(max(len(order), 1) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    legend = _legend(ax, "upper right")
    if legend is not None:
        for line in legend.get_lines():
            line.set_linewidth(4)


def _distribution(ax: Axes, name: str, milliseconds: np.ndarray) -> None:
    """The cumulative distribution of a latency, its median and p99 marked."""
    from matplotlib.ticker import MaxNLocator

    short = LATENCIES[name][0]
    ax.set(title=short, xlabel=f"{short} (ms)")
    ax.grid(color="#e5e5e5")
    ax.set_ylim(0, 101)
    if not len(milliseconds):
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes, color=_GREY)
        return
    values = np.sort(milliseconds)
    shares = np.arange(1, len(values) + 1) / len(values) * 100
    ax.step([values[0], *values], [0, *shares], where="post", color=_BLUE)
    positive = values[values > 0]
    if len(positive) and values[-1] > 30 * np.median(values):
        ax.set_xscale("log", nonpositive="clip")
        ax.set_xlim(left=float(positive[0]))
        _plain_numbers(ax.xaxis, narrow=True)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(lambda tick, _: _plain(tick))
        ax.set_xlim(left=float(values[0]))
    left = ax.get_xlim()[0]
    for name, p, style in (("median", 50, "--"), ("p99", 99, ":")):
        value = float(np.percentile(values, p))
        # Over the frame: the line lies on it if all requests took the same time, or a logarithmic
        # axis cannot show the 0.
        label = f"{name} {_plain(value)} ms"
        ax.axvline(max(value, left), color=_RED, linestyle=style, label=label, zorder=3)
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        fontsize=7,
        frameon=False,
        ncols=2,
        handlelength=1.5,
        columnspacing=1,
    )


def _plain_numbers(axis: Axis, *, narrow: bool = False) -> None:
    """Writes 0.5, 20 and 1,000 beside a logarithmic axis, as many as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    most = 50 if narrow else 1000
    low, high = sorted(axis.get_view_interval())
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < most * low else (1,)))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.6f}".rstrip("0").rstrip("."))
    )
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """Four digits, and all of those before the point: 0.3102, 39.76, 13,690."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _legend(ax: Axes, loc: Literal["best", "upper right"] = "best") -> Legend | None:
    """The legend, unless it would name one thing only."""
    if len(ax.get_legend_handles_labels()[0]) < 2:
        return None
    return ax.legend(loc=loc, fontsize=8)


def _latencies(result: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Milliseconds by latency, of the requests that succeeded."""
    ttfts, itls = _numbers(result["ttfts"]), result["itls"]
    decode = np.asarray([sum(i) for i in itls], np.float64)
    lengths = np.asarray(result["output_lens"])
    good = np.asarray([e is None for e in result.get("errors", [None] * len(ttfts))], bool)
    long = good & (lengths > 1)
    values = {
        "ttft": ttfts[good],
        "tpot": decode[long] / (lengths[long] - 1),
        "itl": np.asarray(
            [t for i, ok in zip(itls, good, strict=True) if ok for t in i], np.float64
        ),
        "e2el": (ttfts + decode)[good],
    }
    return {name: v[~np.isnan(v)] * 1000 for name, v in values.items()}


def _look(index: int) -> tuple[str, str]:
    """Colour and marker of a series; 49 pairs before one comes again."""
    count = len(_COLOURS)
    return _COLOURS[index % count], _MARKERS[(index + index // count) % count]


def _highest_percentile(run: Mapping[str, Any], name: str) -> str | None:
    found = [
        key
        for key in run
        if key.startswith("p") and key.endswith(f"_{name}_ms") and run[key] is not None
    ]
    return max(found, key=lambda key: float(key[1:].split("_")[0]), default=None)


def _number(value: Any) -> float:
    """JSON's null is NaN."""
    return math.nan if value is None else float(value)


def _positive(value: Any) -> float:
    """NaN in the place of what a logarithmic axis cannot show."""
    number = _number(value)
    return number if number > 0 else math.nan


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.asarray([_number(v) for v in values], np.float64)


def _rate(run: Mapping[str, Any]) -> float:
    return float(run.get("request_rate", math.inf))


def _shown_rate(run: Mapping[str, Any]) -> str:
    rate = _rate(run)
    return "all at once" if math.isinf(rate) else f"{rate:.4g}/s"


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BenchError(f"Roofline: {name} is {value!r}; must be a number above 0.")


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches; outside pyplot, so that no display or global state is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    data = io.BytesIO()
    figure.savefig(data, format=Path(path).suffix.lower()[1:])
    results.save_bytes(path, data.getvalue())
