"""Prometheus metrics of several models as one page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.several_models.model_set import Model

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( .*)", re.ASCII)


class _ModelMetrics(Collector):
    """Metrics of the loading of models."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        labels = ["model_name"]
        loaded = GaugeMetricFamily("octavo:model_loaded", "1 if a model is loaded.", labels=labels)
        waiting = GaugeMetricFamily(
            "octavo:model_waiting_requests", "Requests that wait for a model.", labels=labels
        )
        loads = CounterMetricFamily(
            "octavo:model_loads", "Number of times that a model was loaded.", labels=labels
        )
        for model in self._models:
            name = [model.names[0]]
            loaded.add_metric(name, model.state == "loaded")
            waiting.add_metric(name, model.num_waiting)
            loads.add_metric(name, model.num_loads)
        yield from (loaded, waiting, loads)


def join_metrics(pages: Mapping[str, str], models: Sequence[Model]) -> str:
    """Return one page of metrics, in which each metric appears once, with all samples.

    Args:
        pages: pages in Prometheus' text format by the name of their model. Samples without the
            label `model_name` receive it; "": samples that are about no model.
        models: the models, whose loading is shown, too.
    """
    registry = CollectorRegistry()
    registry.register(_ModelMetrics(models))
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, page in [("", generate_latest(registry).decode()), *pages.items()]:
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if not samples.get(family) and line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, name))
    return "\n".join(_lines(heads, samples)) + "\n"


def _lines(
    heads: Mapping[str, Iterable[str]], samples: Mapping[str, Iterable[str]]
) -> Iterator[str]:
    for family, head in heads.items():
        yield from head
        yield from samples.get(family, ())


def _labelled(sample: str, name: str) -> str:
    found = _SAMPLE.fullmatch(sample)
    if not name or found is None or 'model_name="' in (found[2] or ""):
        return sample
    escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'model_name="{escaped}"' + (f",{found[2]}" if found[2] else "")
    return f"{found[1]}{{{labels}}}{found[3]}"
