"""What gpu_check.sh runs: checks and measurements on a GPU, in one table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.base import FULL, QUICK, Bench, Gpu, Row, Sizes
from gpu.correctness import check_invariance, check_parity
from gpu.kernels import measure_card, measure_kernels
from gpu.models import measure_model

LAST_START, LIMIT = 420.0, 455.0
"""Seconds after which no part is started, and after which the one that runs is ended."""


def parts(sizes: Sizes) -> dict[str, Callable[[Bench], None]]:
    """All parts, in order; the first measures what others are compared with."""
    return {
        "card": measure_card,
        "parity": check_parity,
        "invariance": check_invariance,
        "kernels": measure_kernels,
        **{name: partial(measure_model, name=name) for name in sizes.models},
    }


def run_part(part: str, make_gpu: Callable[[], Gpu], sizes: Sizes, folder: Path) -> None:
    """Runs a part in this process; what goes wrong is a row."""
    bench = Bench(make_gpu(), sizes, folder, part)
    try:
        parts(sizes)[part](bench)
    except Exception as error:
        traceback.print_exc()
        bench.add(part, f"{type(error).__name__}: {error}", "runs", False)


def check(child: Sequence[str], names: Sequence[str], out: Path | None = None) -> int:
    """Runs each part in a process of its own and prints the table; returns 1 if a check failed.

    A process that met an error of CUDA can do nothing more with the GPU; the other parts can.

    Args:
        child: a command that runs a part, but for "--part NAME --folder FOLDER".
        names: of the parts.
        out: where to write the rows as JSON, after every part anew.
    """
    start = time.monotonic()
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    title: dict[str, Any] = {"torch": torch.__version__}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in names:
                before = time.monotonic() - start
                if before > LAST_START:
                    rows.append(Row(part, f"skipped: {before:.0f} s had passed", "runs", False))
                else:
                    command = [*child, "--part", part, "--folder", folder]
                    failure = run_child(command, LIMIT - before)
                    file = Path(folder, f"{part}.jsonl")
                    lines = file.read_text().splitlines() if file.exists() else []
                    rows += [Row(**json.loads(line)) for line in lines]
                    if failure is not None:
                        rows.append(Row(part, failure, "runs", False))
                    seconds[part] = round(time.monotonic() - start - before, 1)
                    print(f"-- {part}: {seconds[part]:.0f} s", flush=True)
                card = Path(folder, "card.json")
                if card.exists():
                    title["card"] = json.loads(card.read_text())
                if out is not None:
                    data = title | {"seconds": seconds, "rows": [asdict(row) for row in rows]}
                    out.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        name = title["card"]["name"] if "card" in title else "an unknown card"
        print(f"\nOctavo on {name}, torch {torch.__version__}")
        print_table(rows)
        each = ", ".join(f"{part} {spent:.0f}" for part, spent in seconds.items())
        print(f"{time.monotonic() - start:.0f} s: {each}", flush=True)
    return int(any(row.good is False for row in rows))


def run_child(command: Sequence[str], limit: float) -> str | None:
    """Runs a part; returns what became of it if it did not end well."""
    try:
        status = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s, before it was done"
    return None if status == 0 else f"crashed with status {status}"


def print_table(rows: Sequence[Row]) -> None:
    """All rows for people."""
    verdicts = {None: "", True: "ok", False: "SHORT"}
    lines = [("what", "figure", "aim", "")]
    lines += [(row.what, row.figure, row.aim, verdicts[row.good]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def main() -> int:
    """Runs all parts, or as their child process one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="one model and few sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if args.part is not None:
        run_part(args.part, Gpu, sizes, args.folder)
        return 0
    child = [sys.executable, __file__, *(["--quick"] if args.quick else [])]
    return check(child, list(parts(sizes)), args.out)


if __name__ == "__main__":
    sys.exit(main())
