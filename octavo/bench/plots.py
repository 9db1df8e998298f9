"""Plots of results, as PNG or SVG. matplotlib is imported on demand.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which readers of every
colour vision can distinguish; series also differ in their markers.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench import pictures, results
from octavo.bench.metrics import LATENCIES, RequestRecord
from octavo.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.transforms import Bbox

    from octavo.bench.timeline import Timeline

_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", _RED, "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#999999"
# Positions of a text next to its point, the best first: (right, up).
_DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
_ALIGN = {0: "center", 1: "left", -1: "right"}
_VALIGN = {0: "center", 1: "bottom", -1: "top"}
_FORMATS = (".png", ".svg")
_MOST_LABEL = 60
"""Maximum letters of a legend entry with room for two next to each other."""


def check(path: str | Path, flag: str = "--plot") -> None:
    """Check before a long run that its plot can be drawn.

    Args:
        path: file to write.
        flag: flag that names the file, for the error.

    Raises:
        BenchError: matplotlib is missing, or the file is neither PNG nor SVG.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise BenchError(f"{flag} {path}: must end in {' or '.join(_FORMATS)}.")
    try:
        import matplotlib.figure  # noqa: F401  # check that it is installed
    except ImportError:
        raise BenchError(
            "Plots need matplotlib, which is not installed; install it with "
            "`pip install matplotlib`."
        ) from None


def requests(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw the timeline of a benchmark's requests, and the distributions of its latencies.

    Args:
        result: result of `octavo.bench.serve` or `throughput`, with each request's figures.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`; or the result has no figures of requests.
    """
    check(path)
    ends = "e2els" if "e2els" in result else "itls"
    missing = [n for n in ("start_times", "ttfts", ends, "output_lens") if n not in result]
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
    model = _short_name(result.get("model_id", ""))
    count = len(result["ttfts"])
    plural = "" if count == 1 else "s"
    figure.suptitle(f"{model}: {count:,} request{plural}, {_shown_rate(result)}")
    _save(figure, path)


def throughput_latency(runs: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw TTFT and TPOT (median, and the highest available percentile) over throughput.

    Args:
        runs: runs of a sweep's summary; those with the same `label` form a line, those without
            `output_throughput` (failed ones) are omitted.
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
    figure = _new_figure(11, 5.5)
    rates: list[tuple[Axes, str, str, float, float]] = []
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
                rates += [
                    (ax, colour, _shown_rate(p), p["output_throughput"], float(p[tail]))
                    for p in points
                    if math.isfinite(_positive(p.get(tail)))
                ]
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
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = 1 if max(map(len, labels)) > _MOST_LABEL else 2
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=columns)
    _label_points(figure, rates)
    _save(figure, path)


def trials(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw a search's trials: the objective over each latency with a limit.

    Args:
        result: result of `octavo.bench.tune`.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`.
    """
    check(path)
    objective, limits = result["objective"], result["slo"]
    figure = _new_figure(5.5 * len(limits) + 1, 5)
    budgets = sorted({trial["budget"] for trial in result["trials"]})
    row = figure.subplots(1, len(limits), squeeze=False)[0]
    for ax, (name, limit) in zip(row, limits.items(), strict=True):
        for i, budget in enumerate(budgets):
            colour, marker = _look(i)
            shown = [
                t["figures"]
                for t in result["trials"]
                if t["budget"] == budget and math.isfinite(_positive(t["figures"].get(name)))
            ]
            x, y = [f[name] for f in shown], [f[objective] for f in shown]
            ax.plot(x, y, marker, color=colour, label=f"{budget:,} requests")
        for name_of_trial, colour in (("default", "black"), ("winner", _RED)):
            found = (result[name_of_trial] or {}).get("figures", {})
            if math.isfinite(_positive(found.get(name))):
                label = "best" if name_of_trial == "winner" else name_of_trial
                ring = {"markersize": 14 if label == "best" else 18, "mfc": "none"}
                ax.plot(found[name], found[objective], "o", color=colour, label=label, **ring)
        ax.axvline(limit, color=_GREY, linestyle=":", zorder=0, label="limit")
        ax.set(xlabel=name.replace("_", " "), ylabel=objective.replace("_", " "), xscale="log")
        ax.margins(0.12)
        _plain_numbers(ax.xaxis)
        ax.grid(which="both", color="#e5e5e5")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=len(labels))
    _save(figure, path)


def starts(
    measured: Sequence[Mapping[str, Any]], labels: Mapping[str, str], path: str | Path
) -> None:
    """Draw the times of each start's moments, and the medians.

    Args:
        measured: starts of `octavo.bench.startup`.
        labels: the moments in order, with their labels.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`.
    """
    check(path)
    moments = [name for name in labels if any(name in start for start in measured)]
    figure = _new_figure(9, 1.5 + 0.6 * len(moments))
    ax = figure.subplots()
    for i, cache in enumerate(dict.fromkeys(start["cache"] for start in measured)):
        colour, marker = _look(i)
        for row, name in enumerate(moments):
            seconds = [s[name] for s in measured if s["cache"] == cache and name in s]
            if seconds:
                label = f"{cache} file cache (line: median)" if row == 0 else None
                place = row + (i - 0.5) * 0.2
                ax.plot(seconds, [place] * len(seconds), marker, color=colour, label=label)
                ax.vlines(np.median(seconds), place - 0.15, place + 0.15, colors=colour)
    ax.set_yticks(range(len(moments)), [labels[name] for name in moments])
    ax.set_ylim(len(moments) - 0.5, -0.5)
    ax.set(xlabel="Seconds from process start", title=results.counted(len(measured), "start"))
    ax.set_xlim(left=0)
    ax.grid(axis="x", color="#e5e5e5")
    _legend(ax)
    _save(figure, path)


def roofline(
    points: Sequence[Mapping[str, Any]], bandwidth: float, peak: float, path: str | Path
) -> None:
    """Draw measured operations under the roof of memory and arithmetic; see `pictures.Roof`.

    Args:
        points: dicts of name, flops (floating-point operations), bytes (moved) and seconds.
            Operations without arithmetic are not allowed.
        bandwidth: measured memory bandwidth in bytes per second; if a point is faster, its
            bandwidth replaces it.
        peak: measured floating-point operations per second; if a point is faster, its speed
            replaces it.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`; or there are no points, or a number is not above 0.
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
    roof = pictures.Roof.over(points, bandwidth, peak)
    ridge = roof.ridge
    left, right = roof.span(points)
    line = [left, ridge, right]
    ax.plot(line, [roof.at(x) / 1e9 for x in line], color="black")
    ax.axvline(ridge, color=_GREY, linestyle=":", zorder=0)
    ax.text(right, roof.peak / 1e9 * 1.1, roof.peak_text, fontsize=9, ha="right")
    ax.annotate(
        roof.ridge_text,
        (ridge, 0),
        xycoords=("data", "axes fraction"),
        # On the side with more room, so that it is not cut off.
        xytext=(4, 6) if ridge**2 < left * right else (-4, 6),
        ha="left" if ridge**2 < left * right else "right",
        textcoords="offset points",
        fontsize=9,
    )
    for i, point in enumerate(points):
        colour, marker = _look(i)
        intensity, speed = point["flops"] / point["bytes"], point["flops"] / point["seconds"]
        look: dict[str, Any] = {"color": colour, "markersize": 9, "label": roof.describe(point)}
        ax.plot(intensity, speed / 1e9, marker, **look)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="Arithmetic intensity (FLOP/byte)",
        ylabel="Speed (GFLOP/s)",
        title="Roofline",
    )
    ax.set_ylim(top=roof.peak / 1e9 * 2)
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
    """Draw a simulated engine over time: requests, KV cache, and TTFT by arrival.

    Args:
        timeline: load of the engine.
        records: records of the requests.
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
    _legend(queue)
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


def quality(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw a model's perplexity with its interval and, if there are any, the errors of its layers.

    Args:
        result: result of `octavo.model_tools.quality.measure`.
        path: file to write, PNG or SVG.

    Raises:
        BenchError: see `check`.
    """
    check(path, "--picture")
    layers = result.get("layers") or []
    figure = _new_figure(11 if layers else 5, 4.5)
    axes = figure.subplots(1, 2, width_ratios=(1, 3), squeeze=False) if layers else None
    ax = figure.subplots() if axes is None else axes[0][0]
    names = [name for name in ("base_perplexity", "perplexity") if name in result]
    for i, name in enumerate(names):
        mean, colour = result[name], _BLUE if name == "perplexity" else _ORANGE
        low, high = (mean["value"] if mean[k] is None else mean[k] for k in ("low", "high"))
        errors = [[mean["value"] - low], [high - mean["value"]]]
        ax.errorbar([i], [mean["value"]], yerr=errors, fmt="o", color=colour, capsize=4)
    labels = {"base_perplexity": "base", "perplexity": "model"}
    ax.set_xticks(range(len(names)), [labels[name] for name in names])
    ax.set(ylabel="Perplexity", xlim=(-0.5, len(names) - 0.5))
    if axes is not None:
        places = np.arange(len(layers)) - 1
        ax = axes[0][1]
        ax.bar(places, [100 * row["error"] for row in layers], color=_BLUE, label="own")
        accumulated = [100 * row["accumulated"] for row in layers]
        ax.plot(places, accumulated, "s-", color=_ORANGE, label="accumulated")
        ticks = range(0, len(layers) - 1, 1 + len(layers) // 20)
        ax.set_xticks([-1, *ticks], ["E", *map(str, ticks)])
        ax.set(xlabel="Embedding (E) and layers", ylabel="Relative error (%)")
        ax.set(title=f"KL divergence {result['kl_divergence']['value']:.3g} nats per token")
        _legend(ax)
    figure.suptitle(f"{_short_name(result['model'])}: {result['num_tokens']:,} tokens")
    _save(figure, path)


def _short_name(model: object) -> str:
    return str(model).rstrip("/").rpartition("/")[2]


def _time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit of a time span: its seconds and its name."""
    return (1.0, "s") if seconds < 600 else (60.0, "min") if seconds < 36000 else (3600.0, "h")


def _timeline(ax: Axes, result: Mapping[str, Any]) -> None:
    """Draw a bar for each request: waiting in the client, until the first token, until the last."""
    from matplotlib.ticker import MaxNLocator

    start = np.asarray(result["start_times"], np.float64)
    scheduled = np.asarray(result.get("scheduled_times", start), np.float64)
    first = start + _numbers(result["ttfts"])
    last = first + _decode_seconds(result)
    order = np.argsort(scheduled, kind="stable")
    rows = np.empty(len(order))
    rows[order] = np.arange(len(order))
    # As high as a row, with a small gap if there is room for one.
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
    legend = _legend(ax)
    if legend is not None:
        for line in legend.get_lines():
            line.set_linewidth(4)


def _distribution(ax: Axes, name: str, milliseconds: np.ndarray) -> None:
    """Draw the cumulative distribution of a latency, and mark its median and p99."""
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
        # Draw it over the frame: it is on the frame if all requests took the same time, or
        # if a logarithmic axis cannot show the 0.
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
    """Label a logarithmic axis with numbers such as 0.5, 20 and 1,000, as far as they fit."""
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
    """Format four digits, or all before the point: 0.3102, 39.76, 13,690."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _legend(ax: Axes) -> Legend | None:
    """Put the legend above the axes, outside of the data, if it has more than one entry."""
    count = len(ax.get_legend_handles_labels()[0])
    if count < 2:
        return None
    ax.set_title(ax.get_title(), loc="left")
    ax.set_title("")
    return ax.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=count, fontsize=8, frameon=False
    )


def _label_points(figure: Figure, points: Sequence[tuple[Axes, str, str, float, float]]) -> None:
    """Write a text next to each point, so that it covers neither data nor another text.

    A point has no text if all places next to it are occupied.

    Args:
        figure: complete except for the texts.
        points: axes, colour, text, x and y.
    """
    figure.draw_without_rendering()
    taken: list[Any] = []
    for ax, colour, text, x, y in points:
        lines = [line for line in ax.lines if np.size(line.get_xdata())]
        paths = [line.get_transform().transform_path(line.get_path()) for line in lines]
        dots = np.vstack([path.vertices for path in paths])
        label = ax.annotate(
            text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=7, color=colour
        )
        for distance, (right, up) in itertools.product((7, 14), _DIRECTIONS):
            label.set(ha=_ALIGN[right], va=_VALIGN[up])
            label.xyann = (right * distance, up * distance)
            box = label.get_window_extent().padded(3)
            if not (
                box.count_overlaps(taken)
                or box.count_contains(dots)
                or any(path.intersects_bbox(box, filled=False) for path in paths)
                or not _holds(ax.bbox, box)
            ):
                taken.append(box)
                break
        else:
            label.remove()


def _holds(outer: Bbox, inner: Bbox) -> bool:
    return bool(
        outer.x0 <= inner.x0
        and inner.x1 <= outer.x1
        and outer.y0 <= inner.y0
        and inner.y1 <= outer.y1
    )


def _decode_seconds(result: Mapping[str, Any]) -> np.ndarray:
    """Return the time of each request from its first token to the last."""
    if "e2els" in result:
        difference: np.ndarray = _numbers(result["e2els"]) - _numbers(result["ttfts"])
        return difference
    return np.asarray([sum(itls) for itls in result["itls"]], np.float64)


def _latencies(result: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return milliseconds by latency, of the requests that succeeded."""
    ttfts, decode = _numbers(result["ttfts"]), _decode_seconds(result)
    itls = result.get("itls", [[]] * len(ttfts))  # unknown without streaming
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
    """Return colour and marker of a series; the 49 pairs repeat."""
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
    """Convert a number; JSON's null is NaN."""
    return math.nan if value is None else float(value)


def _positive(value: Any) -> float:
    """Convert a number; NaN if a logarithmic axis cannot show it."""
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
    """Make an empty figure in inches, without pyplot's display and globals."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    data = io.BytesIO()
    figure.savefig(data, format=Path(path).suffix.lower()[1:])
    results.save_bytes(path, data.getvalue())
