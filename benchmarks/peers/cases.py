"""Compared workloads, grouped by the cases that one process of an engine can measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers import quantized, workloads
from peers.base import NGRAM, PREFILL, Case, Row, Setup
from peers.installing import CompareError

TINY, SMALL, TOY = "tinyllama-1.1b", "smollm2-135m", "toy"
STORIES = ("stories-1.1b", "stories-135m")
"""Built-in model in the shapes of the first two (`training.widen`), which writes real text."""
DRAFT = "stories-draft"
"""Draft model of `STORIES`."""
WORKLOADS = ("W1", "W1q", "W1c", "W2", "W3", "W4", "W5", "W6", "W7", "W8")
RATES = (2.0, 6.0)
TTFT_LIMIT_MS, TPOT_LIMIT_MS = 2000.0, 100.0
"""Limits of the highest rate, both at p99."""
LADDER = tuple(round(0.5 * 1.1**i, 2) for i in range(36))
"""Rates of the search, requests/s: 0.5 to 14, 10 % apart."""
QUICK_IN, QUICK_OUT = 256, 12
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Nominal bits of a weight; int4 with one 16-bit scale for 32 weights."""


@dataclass(frozen=True)
class Group:
    """Cases that one process of each engine measures, one after the other."""

    name: str
    model: str
    cases: tuple[Case, ...]
    weights: str = "bf16"
    kv_gib: int = 4
    prefix_caching: bool = False
    max_model_len: int = 4096
    draft: str = ""
    """Source of drafts: nothing, `NGRAM`, or the name of a draft model."""
    server: bool = False
    """True to use the engine's server, also for those with a Python API."""

    def setup(self, models: Path, cores: Sequence[int]) -> Setup:
        """Return the parameters of the engines' start.

        Raises:
            CompareError: the model does not exist.
        """
        folder = models / self.model
        return Setup(
            model=str(folder),
            weights=self.weights,
            kv_gib=self.kv_gib,
            kv_tokens=self.kv_gib * 2**30 // ModelSize.of(folder).kv_bytes,
            max_model_len=self.max_model_len,
            prefix_caching=self.prefix_caching,
            draft=self.draft if self.draft in ("", NGRAM) else str(models / self.draft),
            cores=tuple(cores),
        )


@dataclass(frozen=True)
class ModelSize:
    """Cost of a token on a model of Llama's shape."""

    kv_bytes: int
    """Bytes of KV cache per token, bfloat16."""
    weights: int
    """Number of weights read for one token: all linear layers, including the LM head."""
    prefill_flop: float
    """FLOP per token of a prompt of 2,048: linear layers without LM head, causal attention."""

    @staticmethod
    def of(folder: Path) -> ModelSize:
        """Read a checkpoint's config.json.

        Raises:
            CompareError: the file does not exist.
        """
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        except FileNotFoundError:
            raise CompareError(
                f"There is no model in {folder}; `compare.py install` makes the models, or give "
                "their folder with --models."
            ) from None
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + kv_heads)
        linear = layers * (attention + 3 * hidden * config["intermediate_size"])
        mean_context = (PREFILL + 1) / 2
        return ModelSize(
            kv_bytes=2 * 2 * layers * kv_heads * head,
            weights=linear + hidden * config["vocab_size"],
            prefill_flop=2 * linear + 4 * layers * heads * head * mean_context,
        )


def groups(wanted: Sequence[str], data: Path, *, quick: bool) -> list[Group]:
    """Return the groups of the selected workloads.

    Args:
        wanted: names such as W1.
        data: folder of the request sets.
        quick: use few and short requests, to test the drivers.

    Raises:
        CompareError: a workload is unknown, or a file is invalid.
    """
    for name in wanted:
        if name not in WORKLOADS:
            raise CompareError(f"There is no workload {name!r}; choose from {','.join(WORKLOADS)}.")

    def case(
        name: str, kind: str, file: str, iterations: int = 1, rate: float | None = None
    ) -> Case:
        rows = workloads.read(file, data)
        if quick:
            rows, iterations = shorten(kind, rows), 1
        return Case(name, kind, file, iterations, rate, rows)

    found: list[Group] = []

    def add(workload: str, name: str, model: str, cases: list[Case], **settings: Any) -> None:
        if workload in wanted and cases:
            found.append(Group(name, model, tuple(cases), **settings))

    for model in (TINY, SMALL):
        cases: list[Case] = []
        if "W1" in wanted:
            cases += [
                case(f"W1 {model} batch {n}", "latency", f"w1_b{n}_{model}", times)
                for n, times in ((1, 5), (8, 3))
            ]
        if "W2" in wanted:
            cases.append(case(f"W2 {model}", "throughput", f"w2_{model}"))
        if "W5" in wanted:
            cases.append(case(f"W5 {model}", "prefill", f"w5_{model}", 3))
        if cases:
            found.append(Group(f"{model} bf16", model, tuple(cases)))
    if "W1q" in wanted:
        for weights in ("int8", "int4"):
            cases = [
                case(f"W1q {TINY} {weights} batch {n}", "latency", f"w1_b{n}_{TINY}", times)
                for n, times in ((1, 5), (8, 3))
            ]
            add("W1q", f"{TINY} {weights}", TINY, cases, weights=weights)
    if "W1c" in wanted:
        for form in quantized.FORMATS:
            cases = [
                case(f"W1c {TINY} {form} batch {n}", "latency", f"w1_b{n}_{TINY}", times)
                for n, times in ((1, 5), (8, 3))
            ]
            cases.append(case(f"W1c {TINY} {form} prefill", "prefill", f"w5_{TINY}", 3))
            add("W1c", f"{TINY} {form}", f"{TINY}-{form}", cases, weights=form)
    if "W3" in wanted:
        file = f"w3_{SMALL}"
        cases = [case(f"W3 {SMALL} {rate:g}/s", "serve", file, rate=rate) for rate in RATES]
        cases.append(case(f"W3 {SMALL} highest rate", "search", file))
        add("W3", f"{SMALL} serving", SMALL, cases, server=True)
    if "W4" in wanted:
        cases = [case(f"W4 {SMALL} {kind}", kind, f"w4_{SMALL}", 2) for kind in ("cold", "cached")]
        add("W4", f"{SMALL} shared prefix", SMALL, cases, prefix_caching=True)
    if "W6" in wanted:
        for model in (SMALL, TINY):
            # Some short answers and a long prompt: the memory of a process that has worked.
            rows = workloads.read(f"w1_b8_{model}", data)
            rows += tuple(replace(r, max_tokens=8) for r in workloads.read(f"w5_{model}", data)[:2])
            if quick:
                rows = shorten("start", rows)
            for way in ("offline", "server"):
                start = Case(f"W6 {model} {way}", "start", f"w1_b8_{model}", rows=rows)
                name = f"{model} start {way}"
                add("W6", name, model, [start], kv_gib=1, server=way == "server")
    if "W7" in wanted:
        add("W7", "toy", TOY, [case("W7 toy", "throughput", "w7_toy", 2)])
    for model in STORIES:
        for texts, draft, name in (
            ("stories", "", "no drafts"),
            ("stories", DRAFT, "draft model"),
            ("repeats", "", "no drafts"),
            ("repeats", NGRAM, "n-gram"),
        ):
            title = f"{model} {texts}, {name}"
            cases = [
                case(f"W8 {title}, batch {n}", "throughput", f"w8_b{n}_{texts}", 3) for n in (1, 16)
            ]
            add("W8", title, model, cases, draft=draft, max_model_len=1024)
    return found


def shorten(kind: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the small version of a workload for `--quick`: few requests, short ones."""
    most = {"throughput": 8, "cold": 6, "cached": 6, "serve": 10, "search": 10, "prefill": 1}
    return tuple(
        replace(
            row,
            prompt_token_ids=row.prompt_token_ids[-QUICK_IN:],
            max_tokens=min(QUICK_OUT, row.max_tokens),
        )
        for row in rows[: most.get(kind, len(rows))]
    )
