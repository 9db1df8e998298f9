"""Tables of a comparison, and their place in docs/performance.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.cases import BITS, LADDER, TPOT_LIMIT_MS, TTFT_LIMIT_MS
from peers.installing import CompareError, write_text

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
OWN = "octavo"
TITLES = {
    "octavo": "Octavo",
    "before": "Octavo before",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
    "llama": "llama.cpp",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Metric:
    """Line of a table: its figure, unit, and True if less is better."""

    name: str
    label: str
    less: bool = True
    digits: int = 1


METRICS: dict[str, tuple[Metric, ...]] = {
    "latency": (
        Metric("tpot_ms", "ms a token"),
        Metric("bandwidth_share", "% of the read bandwidth", less=False, digits=0),
        Metric("ttft_ms", "ms to the first", digits=0),
    ),
    "throughput": (Metric("out_tok_s", "output tokens/s", less=False, digits=0),),
    "prefill": (
        Metric("prefill_tok_s", "tokens/s", less=False, digits=0),
        Metric("gflop_s", "GFLOP/s", less=False, digits=0),
        Metric("peak_share", "% of the matrix peak", less=False, digits=0),
    ),
    "cold": (Metric("seconds", "s", digits=2),),
    "cached": (Metric("seconds", "s", digits=2),),
    "serve": (
        Metric("ttft_ms_p50", "TTFT p50, ms", digits=0),
        Metric("ttft_ms_p99", "TTFT p99, ms", digits=0),
        Metric("tpot_ms_p50", "TPOT p50, ms"),
        Metric("tpot_ms_p99", "TPOT p99, ms"),
        Metric("itl_ms_p99", "ITL p99, ms", digits=0),
        Metric("out_tok_s", "output tokens/s", less=False, digits=0),
    ),
    "search": (Metric("rate", "requests/s", less=False, digits=2),),
    "start": (
        Metric("ready_s", "s until loaded or ready", digits=2),
        Metric("first_token_s", "s to the first token", digits=2),
        Metric("peak_mib", "MiB at most", digits=0),
    ),
}
SECTIONS = {
    "W1": "Latency: 32 tokens in, 128 out",
    "W1q": "Latency with quantized weights",
    "W1c": "Quantized checkpoints: 32 tokens in, 128 out; one prompt of 2,048 tokens",
    "W2": "Offline throughput: requests of mixed length",
    "W3": "Serving over HTTP, Poisson arrivals",
    "W4": "Shared prefix: 48 requests of 1,024 shared and 32 own tokens, 16 out",
    "W5": "Prefill: one prompt of 2,048 tokens",
    "W6": "Start and peak memory, KV cache of 1 GiB",
    "W7": "Toy model, 256 requests at once: the engine's own costs",
    "W8": "Speculative decoding: stories, and texts that repeat themselves; 96 tokens out",
}
BUSY_CLIENT, LATE_CLIENT_MS = 0.5, 20.0


@dataclass(frozen=True)
class Spread:
    """Median and extremes of some measurements."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """Make the spread of values; return None if there are none."""
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def show(self, digits: int, *, bold: bool = False) -> str:
        """Format as `12.0 (11.4-12.5)`."""
        star = "**" if bold else ""
        text = f"{star}{self.median:,.{digits}f}{star}"
        if self.count > 1:
            text += f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return text


def advantage(own: Spread, other: Spread, *, less: bool) -> float | None:
    """Return how many times better the own median is, or None if one of them is 0."""
    if not own.median or not other.median:
        return None
    return other.median / own.median if less else own.median / other.median


def values(data: dict[str, Any], engine: str, case: str, metric: str) -> list[float]:
    """Return the valid measurements of a figure, including derived figures."""
    note = data["settings"]["cases"][case]
    valid = [
        sample["metrics"]
        for sample in data["samples"]
        if sample["engine"] == engine
        and sample["case"] == case
        and not sample["metrics"].get("wrong_tokens")
    ]
    size = data["settings"]["models"][note["model"]]
    if metric == "bandwidth_share":
        if note["weights"] not in BITS:
            return []
        gigabytes = size["weights"] * BITS[note["weights"]] / 8 / 1e9
        return [
            100 * gigabytes / (m["tpot_ms"] / 1e3) / m["bandwidth_gb_s"]
            for m in valid
            if "bandwidth_gb_s" in m
        ]
    if metric in ("gflop_s", "peak_share"):
        speeds = [m["prefill_tok_s"] * size["prefill_flop"] / 1e9 for m in valid]
        limit = limits(data, "peak_gflop_s", note["group"])
        if metric == "gflop_s" or limit is None:
            return speeds if metric == "gflop_s" else []
        return [100 * speed / limit.median for speed in speeds]
    return [m[metric] for m in valid if metric in m]


def highest_rates(data: dict[str, Any], engine: str, case: str) -> list[float]:
    """Return the highest rate within the limits, of each turn."""
    by_turn: dict[int, list[float]] = {}
    for sample in data["samples"]:
        if (sample["engine"], sample["case"]) == (engine, case):
            passed = by_turn.setdefault(sample["turn"], [0.0])
            m = sample["metrics"]
            if (
                m["ttft_ms_p99"] < TTFT_LIMIT_MS
                and m["tpot_ms_p99"] < TPOT_LIMIT_MS
                and not m["wrong_tokens"]
            ):
                passed.append(m["rate"])
    return [max(rates) for rates in by_turn.values()]


def limits(data: dict[str, Any], name: str, group: str | None = None) -> Spread | None:
    """Return a limit of the machine: over the whole run, or in a group's turns."""
    chosen = [limit for limit in data["limits"] if group is None or limit["group"] == group]
    return Spread.of([limit[name] for limit in chosen])


def _by(data: dict[str, Any], name: str) -> str:
    """Return the methods with the best limit, which may differ between turns."""
    return ", ".join(dict.fromkeys(limit[name] for limit in data["limits"]))


def tables(data: dict[str, Any]) -> str:
    """Format all tables of a results file in Markdown."""
    parts = [_preface(data)]
    engines = [name for name in TITLES if name in data["versions"]]
    for workload, title in SECTIONS.items():
        cases = [name for name in data["settings"]["cases"] if name.split()[0] == workload]
        rows = [row for case in cases for row in _rows(data, engines, case, workload)]
        if rows:
            head = ["", *(TITLES[engine] for engine in engines)]
            lines = [head, ["---"] * len(head), *rows]
            table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
            parts.append(f"### {workload}: {title}\n\n{table}")
    notes = _notes(data)
    if notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _rows(
    data: dict[str, Any], engines: Sequence[str], case: str, workload: str
) -> list[list[str]]:
    found = []
    for metric in METRICS[data["settings"]["cases"][case]["kind"]]:
        spreads = {
            engine: Spread.of(
                highest_rates(data, engine, case)
                if metric.name == "rate"
                else values(data, engine, case, metric.name)
            )
            for engine in engines
        }
        if metric.name in ("bandwidth_share", "gflop_s", "peak_share") and not any(
            spreads.values()
        ):
            continue
        found.append(
            [
                f"{case.removeprefix(workload + ' ')}: {metric.label}",
                *(_cell(data, engine, case, metric, spreads) for engine in engines),
            ]
        )
    return found


def _cell(
    data: dict[str, Any],
    engine: str,
    case: str,
    metric: Metric,
    spreads: dict[str, Spread | None],
) -> str:
    spread = spreads[engine]
    if spread is None:
        if any((s["engine"], s["case"]) == (engine, case) for s in data["samples"]):
            return "wrong length"
        if any((f["engine"], f["case"]) == (engine, case) for f in data["failures"]):
            return "failed"
        return "-"
    medians = [s.median for s in spreads.values() if s is not None]
    best = min(medians) if metric.less else max(medians)
    text = spread.show(metric.digits, bold=spread.median == best and len(medians) > 1)
    own = spreads.get(OWN)
    if engine == OWN or own is None or "share" in metric.name or metric.name == "gflop_s":
        return text
    factor = advantage(own, spread, less=metric.less)
    return text if factor is None else f"{text}; {factor:.2f}x"


def _preface(data: dict[str, Any]) -> str:
    machine = data["machine"]
    times = sorted(sample["time"] for sample in data["samples"])
    turns = 1 + max((sample["turn"] for sample in data["samples"]), default=-1)
    lines = [
        f"Machine: {machine['cores']} cores of {machine['processor']}"
        f" ({', '.join(machine['instructions']) or 'no vector extensions'}),"
        f" {machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}."
    ]
    if times:
        lines.append(f"Measured {times[0][:10]} in {turns} round{'s' * (turns > 1)}.")
    bandwidth, peak = limits(data, "bandwidth_gb_s"), limits(data, "peak_gflop_s")
    if bandwidth is not None and peak is not None:
        lines.append(
            f"Its limits, measured in the same run: {bandwidth.show(1)} GB/s read"
            f" ({_by(data, 'bandwidth_by')}), {peak.show(0)} GFLOP/s in a bfloat16 matrix product"
            f" of 2048^3 ({_by(data, 'peak_by')})."
        )
    shown = []
    for note in data["versions"].values():
        libraries = ", ".join(f"{k} {v}" for k, v in note.get("versions", {}).items())
        shown.append(f"{note['version']} ({libraries})" if libraries else note["version"])
    lines.append(f"Versions: {'; '.join(shown)}.")
    if data["settings"]["quick"]:
        lines.append("**A quick run with few, short requests: these figures mean nothing.**")
    lines.append(
        "\n\nMedian (least-most) over all turns; bold is the best. The factor behind a peer's"
        " figure says how many times better Octavo's is: above 1 Octavo is ahead. The same requests"
        " and weights (random, bfloat16 unless named) for all; greedy; every answer's length was"
        " checked. One process for each engine and turn, engines in turn, each in the best"
        " configuration found. To repeat:\n\n"
        "```\n"
        "python benchmarks/compare.py install --into FOLDER\n"
        "python benchmarks/compare.py run --models FOLDER/models --out results.json\n"
        "python benchmarks/compare.py report results.json\n"
        "```"
    )
    return " ".join(lines).replace(" \n", "\n")


def _notes(data: dict[str, Any]) -> list[str]:
    notes = []
    if any(case["kind"] == "search" for case in data["settings"]["cases"].values()):
        notes.append(
            f"Highest rate: TTFT p99 under {TTFT_LIMIT_MS / 1e3:g} s and TPOT p99 under"
            f" {TPOT_LIMIT_MS:g} ms; tried {LADDER[0]:g} to {LADDER[-1]:g} requests/s in steps of"
            " 10 %; 0: the lowest rate already exceeds a limit."
        )
    if any("bandwidth_gb_s" in sample["metrics"] for sample in data["samples"]):
        notes.append(
            "% of the read bandwidth: relative to the bandwidth of the same cores just before and"
            " just after the measurement, if the two agree within 10 %; the bytes read are those of"
            " the weights at their nominal number of bits (int4: 4.5)."
        )
    by_reason: dict[tuple[str, str], list[str]] = {}
    for absence in data["absences"]:
        by_reason.setdefault((absence["engine"], absence["reason"]), []).append(absence["case"])
    for (engine, reason), cases in by_reason.items():
        workloads = ", ".join(dict.fromkeys(case.split()[0] for case in cases))
        notes.append(f"{TITLES[engine]} {reason} ({workloads}).")
    for failure in data["failures"]:
        # Remove folders of the measuring machine from the document.
        reason = re.sub(r"(/[\w.+-]+)+/", "", " ".join(failure["reason"].split()))[-200:]
        notes.append(f"{TITLES[failure['engine']]} failed at {failure['case']}: {reason}")
    for engine in data["versions"]:
        bad = [
            sample["case"]
            for sample in data["samples"]
            if sample["engine"] == engine and sample["metrics"].get("wrong_tokens")
        ]
        for case in dict.fromkeys(bad):
            notes.append(
                f"{TITLES[engine]} answered with a wrong number of tokens in {bad.count(case)}"
                f" measurements of {case}; they do not count."
            )
    if data["versions"].get("vllm", {}).get("tcmalloc") is False:
        notes.append("vLLM ran without tcmalloc, which could not be installed.")
    clients = [s["metrics"] for s in data["samples"] if "lag_ms_p99" in s["metrics"]]
    busy = [m for m in clients if m["client_cpu"] > BUSY_CLIENT or m["lag_ms_p99"] > LATE_CLIENT_MS]
    if clients:
        share = statistics.median(m["client_cpu"] for m in clients)
        notes.append(
            f"The HTTP client took {100 * share:.0f} % of a core (median); in {len(busy)} of"
            f" {len(clients)} replays it was busy or late itself."
        )
    return notes


def write(text: str, path: Path) -> None:
    """Write the tables between the marks in a document.

    Raises:
        CompareError: the document or its marks are missing.
    """
    try:
        old = path.read_text()
    except FileNotFoundError:
        raise CompareError(f"There is no document {path}.") from None
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CompareError(f"{path} needs the lines {BEGIN} and {END}; the tables go between.")
    write_text(path, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
