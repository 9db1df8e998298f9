"""Metrics as objects, as vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Metric:
    """Base of the kinds of metric."""

    name: str
    """Name with its prefix, and without a counter's `_total`."""
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Number that never decreases."""

    value: int


@dataclass
class Vector(Metric):
    """Counter for each position of a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """Number that may grow and shrink."""

    value: float


@dataclass
class Histogram(Metric):
    """Counts of values up to each of several bounds."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Counts by the bound; "+Inf" has all values."""


def read_metrics(text: str) -> list[Metric]:
    """Return the metrics of a page in Prometheus' text format."""
    return [metric for family in text_string_to_metric_families(text) for metric in _read(family)]


def _read(family: Family) -> list[Metric]:
    by_labels: dict[tuple[tuple[str, str], ...], Metric] = {}
    for name, labels, value, *_ in family.samples:
        if name.endswith("_created"):
            continue
        own = {k: v for k, v in labels.items() if k not in ("le", "position")}
        key = tuple(own.items())
        if family.type == "gauge":
            by_labels[key] = Gauge(name, own, value)
        elif family.type == "counter" and "position" in labels:
            vector = by_labels.setdefault(key, Vector(family.name, own, []))
            assert isinstance(vector, Vector)
            vector.values.append(int(value))
        elif family.type == "counter":
            by_labels[key] = Counter(family.name, own, int(value))
        elif family.type == "histogram":
            histogram = by_labels.setdefault(key, Histogram(family.name, own, 0, 0.0, {}))
            assert isinstance(histogram, Histogram)
            if name.endswith("_bucket"):
                histogram.buckets[labels["le"]] = int(value)
            elif name.endswith("_count"):
                histogram.count = int(value)
            else:
                histogram.sum = value
    return list(by_labels.values())
