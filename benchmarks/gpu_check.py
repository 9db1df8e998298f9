"""Program of gpu_check.sh: checks and measurements on a GPU, in one table."""

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
from gpu.families import check_families
from gpu.kernels import measure_card, measure_kernels
from gpu.lora import check_lora
from gpu.models import measure_model
from gpu.quantized import check_quantized

LAST_START, LIMIT = 420.0, 455.0
"""Seconds after which no part is started, and after which a running part is ended."""


def parts(sizes: Sizes) -> dict[str, Callable[[Bench], None]]:
    """Return all parts, in order; the first measures the reference values."""
    return {
        "card": measure_card,
        "parity": check_parity,
        "invariance": check_invariance,
        "families": check_families,
        "kernels": measure_kernels,
        "quantized": check_quantized,
        "lora": check_lora,
        **{name: partial(measure_model, name=name) for name in sizes.models},
    }


def run_part(part: str, make_gpu: Callable[[], Gpu], sizes: Sizes, folder: Path) -> None:
    """Run a part in this process; an error becomes a row."""
    bench = Bench(make_gpu(), sizes, folder, part)
    try:
        parts(sizes)[part](bench)
    except Exception as error:
        traceback.print_exc()
        bench.add(part, f"{type(error).__name__}: {error}", "runs", False)


def check(child: Sequence[str], names: Sequence[str], out: Path | None = None) -> int:
    """Run each part in a separate process and print the table; return 1 if a check failed.

    After a CUDA error a process cannot use the GPU any more; the other parts still can.

    Args:
        child: command that runs a part, without "--part NAME --folder FOLDER".
        names: names of the parts.
        out: file for the rows as JSON, rewritten after every part.
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
    """Run a part; return a description of its failure, if it failed."""
    try:
        status = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s, before it was done"
    return None if status == 0 else f"crashed with status {status}"


def print_table(rows: Sequence[Row]) -> None:
    """Print all rows as a table."""
    verdicts = {None: "", True: "ok", False: "SHORT"}
    lines = [("what", "figure", "aim", "")]
    lines += [(row.what, row.figure, row.aim, verdicts[row.good]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def main() -> int:
    """Run all parts, or, in a child process, one."""
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
