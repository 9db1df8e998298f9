"""Pictures of results as data: a result holds its picture, and the web page draws it.

`plots.py` draws the same with matplotlib. A picture is a dict: title, axes x and y with name, log,
zero (the axis begins at 0), down (it runs downwards) and names (texts of the values 0, 1, ...),
series, and marks, which are vertical lines (x, text). A series has label, kind ("line" or "dots"),
colour (1 to 7), open (True for rings instead of dots), and points (x, y).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Roof:
    """Limits of a machine: an operation of intensity I reaches at most min(peak, I * bandwidth).

    The model is that of Williams, Waterman and Patterson ("Roofline", 2009).
    """

    peak: float
    """Floating-point operations per second."""
    bandwidth: float
    """Bytes per second."""

    @classmethod
    def over(cls, points: Sequence[Mapping[str, Any]], bandwidth: float, peak: float) -> Roof:
        """Return the roof; the machine can do at least what a point has reached.

        Args:
            points: dicts of flops, bytes and seconds.
            bandwidth: measured bytes per second.
            peak: measured floating-point operations per second.
        """
        return cls(
            max(peak, *(p["flops"] / p["seconds"] for p in points)),
            max(bandwidth, *(p["bytes"] / p["seconds"] for p in points)),
        )

    @property
    def ridge(self) -> float:
        """Intensity, in operations per byte, from which on arithmetic is the limit."""
        return self.peak / self.bandwidth

    def at(self, intensity: float) -> float:
        """Return the operations per second that an intensity allows."""
        return min(self.peak, intensity * self.bandwidth)

    def span(self, points: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Return the first and the last intensity of a picture."""
        all_intensities = [self.ridge, *(p["flops"] / p["bytes"] for p in points)]
        return min(all_intensities) / 3, max(all_intensities) * 3

    @property
    def ridge_text(self) -> str:
        """Text at the ridge."""
        return f"memory {self.bandwidth / 1e9:.4g} GB/s; ridge at {self.ridge:.3g} FLOP/byte"

    @property
    def peak_text(self) -> str:
        """Text of the roof."""
        return f"peak {self.peak / 1e9:.4g} GFLOP/s"

    def describe(self, point: Mapping[str, Any]) -> str:
        """Return the text of an operation."""
        speed, seconds = point["flops"] / point["seconds"], point["seconds"]
        share = speed / self.at(point["flops"] / point["bytes"])
        return (
            f"{point['name']}: {speed / 1e9:.4g} GFLOP/s, "
            f"{point['bytes'] / seconds / 1e9:.4g} GB/s, {share:.0%} of the roof"
        )


def roofline(
    points: Sequence[Mapping[str, Any]], bandwidth: float, peak: float
) -> dict[str, Any] | None:
    """Return the picture of measured operations under the roof; None without any.

    Args:
        points: as for `plots.roofline`.
        bandwidth: measured bytes per second.
        peak: measured floating-point operations per second.
    """
    if not points:
        return None
    roof = Roof.over(points, bandwidth, peak)
    left, right = roof.span(points)
    line = [[x, roof.at(x) / 1e9] for x in (left, roof.ridge, right)]
    series = [{"label": roof.peak_text, "kind": "line", "colour": 7, "points": line}]
    for i, point in enumerate(points):
        place = [point["flops"] / point["bytes"], point["flops"] / point["seconds"] / 1e9]
        dot = {"kind": "dots", "colour": i % 6 + 1, "points": [place]}
        series.append({"label": roof.describe(point), **dot})
    return {
        "title": "Roofline",
        "x": {"name": "Arithmetic intensity (FLOP/byte)", "log": True},
        "y": {"name": "Speed (GFLOP/s)", "log": True},
        "series": series,
        "marks": [[roof.ridge, roof.ridge_text]],
    }


def starts(measured: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the picture of the times of each start's moments, with rings at the medians.

    Args:
        measured: starts of `octavo.bench.startup`.
        labels: the moments in order, with their labels.
    """
    moments = [name for name in labels if any(name in start for start in measured)]
    series = []
    for i, cache in enumerate(dict.fromkeys(start["cache"] for start in measured)):
        of_cache = [start for start in measured if start["cache"] == cache]
        seconds = [[start[name] for start in of_cache if name in start] for name in moments]
        look = {"kind": "dots", "colour": i + 1}
        dots = [[time, row] for row, times in enumerate(seconds) for time in times]
        rings = [[statistics.median(times), row] for row, times in enumerate(seconds) if times]
        label = f"{cache} file cache"
        series.append({"label": label, "points": dots, **look})
        series.append({"label": f"{label}, median", "points": rings, "open": True, **look})
    return {
        "title": "Starts",
        "x": {"name": "Seconds from process start", "zero": True},
        "y": {"name": "", "down": True, "names": [labels[name] for name in moments]},
        "series": series,
        "marks": [],
    }
