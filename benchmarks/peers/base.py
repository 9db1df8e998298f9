"""Interface of a compared engine, and the loop that measures it in its own environment.

An engine is measured in a fresh process: `python -m peers.NAME JOB OUT`, started in the engine's
environment, reads the JSON file JOB and appends one JSON line to OUT for each measurement. This
file only needs the standard library, so it runs in every environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

TOKENS = (300, 20000)
"""Range of the token ids in the workloads of large models; `shifted` stays within it."""
PREFILL = 2048
NGRAM = "ngram"
"""Drafting from the previous tokens of a request."""


@dataclass(frozen=True)
class Row:
    """Request: prompt, exact number of tokens to generate, and time of sending."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_unit: float = 0.0
    """Seconds after the start at a rate of one request per second."""


@dataclass(frozen=True)
class Setup:
    """Parameters of an engine's start."""

    model: str
    """Folder of the checkpoint."""
    weights: str = "bf16"
    """Format: bf16; int8 or int4, made of bf16 at load; or the format of a quantized checkpoint."""
    kv_gib: int = 4
    """Size of the KV cache, GiB."""
    kv_tokens: int = 0
    """Size of the KV cache in tokens of this model."""
    max_num_seqs: int = 256
    max_model_len: int = 4096
    prefix_caching: bool = False
    draft: str = ""
    """Source of drafts: nothing, `NGRAM`, or the folder of a draft model."""
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """Case to measure.

    Kinds: latency (ms per output token and to the first), throughput (output tokens/s), prefill
    (prompt tokens/s), cold and cached (seconds for a shared prefix), serve (arrivals at a rate),
    search (the highest rate within limits), start (seconds to the first token; memory).
    """

    name: str
    kind: str
    file: str
    """Name of the workload."""
    iterations: int = 1
    rate: float | None = None
    """Requests per second; None: all at once."""
    rows: tuple[Row, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Answer:
    """Times of a request's first and last token (s, `time.perf_counter`), and their number."""

    first: float
    last: float
    num_tokens: int


@dataclass(frozen=True)
class Job:
    """Work of one process."""

    setup: Setup
    cases: tuple[Case, ...]
    done: tuple[tuple[str, int], ...] = ()
    """Case and iteration of the measurements that need not be repeated."""
    spawned: float = 0.0
    """Start time of the process, `time.perf_counter` (one clock for all processes)."""
    reader: tuple[str, ...] = ()
    """Command that reads memory and prints the input of `best_reads`."""

    def to_json(self) -> str:
        """Return the job as JSON for a process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """Invert `to_json`."""
        plain = json.loads(text)
        setup = plain["setup"]
        cases = [
            Case(**{**case, "rows": tuple(Row(**row) for row in case["rows"])})
            for case in plain["cases"]
        ]
        return Job(
            Setup(**{**setup, "cores": tuple(setup["cores"])}),
            tuple(cases),
            tuple((name, iteration) for name, iteration in plain["done"]),
            plain["spawned"],
            tuple(plain["reader"]),
        )


Generate = Callable[[Sequence[Row], bool], Sequence[Answer]]
"""Function that answers all rows at once, greedily and past the end token. If the flag is False, no
token times are needed, and an engine may collect its answers once, at the end."""


class Peer(ABC):
    """Engine under comparison."""

    name: str
    """Name on the command line, and of its folder."""
    title: str
    """Name in the tables."""
    drafts = False
    """True if it is also measured with drafts."""
    offline = True
    """True if it is measured by its Python API; False: only by its server."""
    ready_path = "/health"
    """Path that answers 200 once the server accepts requests."""

    @abstractmethod
    def install(self, root: Path, models: Path) -> None:
        """Install the engine under `root` and convert the models as needed."""

    def refusal(self, setup: Setup, case: Case) -> str | None:
        """Return why a case cannot be measured, or None if it can."""
        return None

    def python(self, root: Path) -> str:
        """Return the interpreter of its environment."""
        return str(root / self.name / "env" / "bin" / "python")

    def driver(self, root: Path) -> list[str]:
        """Return the command that measures it by its Python API, without job and output file."""
        return [self.python(root), "-m", f"peers.{self.name}"]

    def environment(self, root: Path, setup: Setup) -> dict[str, str]:
        """Return the environment variables of its best configuration."""
        return {}

    def model(self, root: Path, setup: Setup) -> str:
        """Return the file or folder that it loads."""
        return setup.model

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """Return the command that starts its OpenAI-compatible server."""
        raise NotImplementedError(self.name)

    def body(self, setup: Setup) -> dict[str, Any]:
        """Return additional fields of a request to its server."""
        return {}


def shifted(rows: Sequence[Row], by: int) -> list[Row]:
    """Replace the tokens but not the lengths and the sharing, so that no prefix is cached."""
    low, high = TOKENS
    return [
        replace(
            row,
            prompt_token_ids=[
                low + (token - low + 1009 * by) % (high - low) for token in row.prompt_token_ids
            ],
        )
        for row in rows
    ]


def warm_up_rows(case: Case) -> list[Row]:
    """Return the requests of a warm-up before a case is measured."""
    if case.kind == "prefill":
        return [case.rows[-1]]
    if case.kind in ("cold", "cached"):
        return [replace(row, max_tokens=4) for row in shifted(case.rows[:2], 7919)]
    return [replace(row, max_tokens=min(8, row.max_tokens)) for row in case.rows[:8]]


def rows_of(case: Case, iteration: int) -> tuple[list[Row], list[Row]]:
    """Return the untimed requests before a measurement, and the measured ones."""
    if case.kind == "prefill":
        return [], [case.rows[iteration % len(case.rows)]]
    if case.kind == "cold":
        return [], shifted(case.rows, 2 * iteration + 1)
    if case.kind == "cached":
        rows = shifted(case.rows, 2 * iteration + 2)
        return rows[:1], rows
    return [], list(case.rows)


def best_reads(output: str) -> tuple[str, dict[str, list[float]]]:
    """Parse lines `WAY BLOCK GB/S`; return the fastest way, and its speeds by block."""
    ways: dict[str, dict[str, list[float]]] = {}
    for line in output.splitlines():
        way, block, speed = line.split()
        ways.setdefault(way, {}).setdefault(block, []).append(float(speed))

    def median(way: str) -> float:
        return statistics.median(speed for speeds in ways[way].values() for speed in speeds)

    best = max(ways, key=median)
    return best, ways[best]


class Bandwidth:
    """Memory bandwidth around a measurement that it limits: one request at a time.

    On a shared machine the bandwidth changes within seconds, by more than engines differ. So it is
    measured right before and right after, and used if both agree.
    """

    TOLERANCE = 0.1

    def __init__(self, reader: Sequence[str], case: Case) -> None:
        wanted = case.kind == "latency" and len(case.rows) == 1
        self._reader = list(reader) if wanted else []
        self._before = self._now()

    def _now(self) -> float:
        if not self._reader:
            return 0.0
        time.sleep(0.3)  # spinning threads have gone to sleep
        done = subprocess.run(self._reader, capture_output=True, text=True, check=True)
        _, blocks = best_reads(done.stdout)
        return statistics.median(speed for speeds in blocks.values() for speed in speeds)

    def metrics(self) -> dict[str, float]:
        """Return `bandwidth_gb_s` around the measurement; empty if it is unknown."""
        before, after = self._before, self._now()
        if not self._reader or abs(after - before) > self.TOLERANCE * min(before, after):
            return {}
        return {"bandwidth_gb_s": (before + after) / 2}


def metrics(
    case: Case, rows: Sequence[Row], answers: Sequence[Answer], begin: float, end: float
) -> dict[str, float]:
    """Return the figures of one measurement; `wrong_tokens` counts requests of a wrong length."""
    seconds = end - begin
    wrong = sum(
        answer.num_tokens != row.max_tokens for row, answer in zip(rows, answers, strict=True)
    )
    found = {"seconds": seconds, "wrong_tokens": float(wrong)}
    if case.kind == "latency":
        found["ttft_ms"] = statistics.median(1e3 * (a.first - begin) for a in answers)
        found["tpot_ms"] = statistics.median(
            1e3 * (a.last - a.first) / max(1, a.num_tokens - 1) for a in answers
        )
    elif case.kind == "prefill":
        found["prefill_tok_s"] = sum(len(row.prompt_token_ids) for row in rows) / seconds
    elif case.kind == "throughput":
        found["out_tok_s"] = sum(a.num_tokens for a in answers) / seconds
    return found


def tree_peak_mib(pid: int) -> float:
    """Return the sum of the peak resident memory of a process and its living descendants in MiB."""
    total = 0.0
    with contextlib.suppress(OSError):  # a process may end while it is looked at
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) / 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += tree_peak_mib(int(child))
    return total


def drive(load: Callable[[Setup], Generate]) -> None:
    """Run the main function of a process that measures an engine by its Python API."""
    job_file, out_file = sys.argv[1:]
    job = Job.from_json(Path(job_file).read_text())
    with Path(out_file).open("a") as out:

        def tell(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        generate = load(job.setup)
        loaded = time.perf_counter() - job.spawned
        generate([replace(job.cases[0].rows[0], max_tokens=1)], False)
        first_token = time.perf_counter() - job.spawned
        for case in job.cases:
            if case.kind == "start":
                generate(case.rows, False)
                start = {"ready_s": loaded, "first_token_s": first_token, "wrong_tokens": 0.0}
                start["peak_mib"] = tree_peak_mib(os.getpid())
                tell(case=case.name, iteration=0, metrics=start)
                continue
            todo = [i for i in range(case.iterations) if (case.name, i) not in job.done]
            if todo:
                generate(warm_up_rows(case), False)
            for iteration in todo:
                before, rows = rows_of(case, iteration)
                if before:
                    generate(before, False)
                bandwidth = Bandwidth(job.reader, case)
                begin = time.perf_counter()
                answers = generate(rows, case.kind == "latency")
                end = time.perf_counter()
                found = metrics(case, rows, answers, begin, end) | bandwidth.metrics()
                tell(case=case.name, iteration=iteration, metrics=found)
