"""Compare a model's matrix products with those of oneDNN, which may add in any order.

    python benchmarks/invariance_cost.py FOLDER --rows 1 8 64 2048

Octavo adds along K in one order for every number of rows, so that a request has the same bits in
every batch. oneDNN (by torch) packs each weight for the number of rows and chooses its order, its
tiles and its division among the threads freely. Both compute all different linear weights of the
model in bfloat16 with the same threads, in turns. Prints for each number of rows the sum of the
times over the layers, medians of the rounds, and the ratio: above 1 Octavo is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.native import NativeOps, set_num_threads
from octavo.models.registry import read_spec
from octavo.system.tensor import from_dlpack

BETWEEN_NBYTES = 2**27
"""Bytes that are read between two products, so that each reads its weight from memory."""


def main() -> None:
    """Measure the model's products, and print a line for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    spec = read_spec(open_checkpoint(args.folder))
    shapes = Counter(w.shape for w in spec.weights() if w.kind == "linear")
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    set_num_threads(threads)
    ops = NativeOps()
    evicting = np.zeros(BETWEEN_NBYTES // 8)
    for rows in args.rows:
        sums = {"octavo": 0.0, "oneDNN": 0.0}
        for (n, k), count in shapes.items():
            found = measure(ops, rows, n, k, args.rounds, evicting)
            for name, seconds in found.items():
                sums[name] += count * seconds
        ours, theirs = sums.values()
        print(
            f"{rows:5} rows: octavo {1e3 * ours:.2f} ms, oneDNN {1e3 * theirs:.2f} ms; "
            f"ratio {theirs / ours:.2f}",
            flush=True,
        )


def measure(
    ops: NativeOps, rows: int, n: int, k: int, rounds: int, evicting: np.ndarray
) -> dict[str, float]:
    """Return the median seconds of x [rows, k] times a weight [n, k], for both."""
    weight = torch.randn(n, k).bfloat16()
    x = torch.randn(rows, k).bfloat16()
    ours, ours_x = ops.pack_weight(from_dlpack(weight)), from_dlpack(x)
    theirs = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    functions: dict[str, Callable[[], object]] = {
        "octavo": lambda: ops.linear(ours_x, ours),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, theirs, None, "none", [], ""),
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            evicting.sum()
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
