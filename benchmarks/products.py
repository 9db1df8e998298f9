"""Speed of the products with weights in each format, on one core, for several numbers of rows.

    OCTAVO_ISA=avx2 python benchmarks/products.py --rows 1 8 64 --formats int8 int4 q4_k

Prints 10^9 operations per second (a multiplication and an addition are two). The time is the
processor time of the thread, so that other work on the machine counts little. The weight fits in
the caches: this is the speed of computing, not of memory.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, cast, get_args

import ml_dtypes
import numpy as np

from octavo import _native
from octavo.kernels.native import NativeOps
from octavo.kernels.weights import Codes, PackedWeight, QuantFormat, QuantizedWeight
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.tensor import from_numpy

GROUP_SIZE = 32
OUTPUTS, INPUTS = 1024, 2048
ONLINE = ("int8", "int4_levels", "fp8")
ROUNDS = 7


def make_weight(ops: NativeOps, format: str) -> PackedWeight | QuantizedWeight:
    """Return a random weight [OUTPUTS, INPUTS]."""
    generator = np.random.default_rng(0)
    floats = from_numpy(generator.normal(size=(OUTPUTS, INPUTS)).astype(np.float32))
    if format == "bfloat16":
        return ops.pack_weight(floats, "bfloat16")
    if format in ONLINE:
        group_size = GROUP_SIZE if format == "int4_levels" else 0
        return ops.quantize_weight([floats], cast(Any, format), group_size)
    if format in BLOCK_TYPES:
        block = BLOCK_TYPES[format]
        shape = OUTPUTS, INPUTS // block.numbers, block.nbytes
        # No byte has a high bit, so that no scale is infinite or NaN.
        blocks = generator.integers(0, 256, shape, dtype=np.uint8) & 0x33
        # Nor is a scale so small that it or a product is subnormal, which takes much more time.
        if format == "mxfp4":
            blocks[..., 0] |= 0x40
        elif format == "nvfp4":
            blocks[..., 3:6] |= 0x30
        blocks = blocks.reshape(OUTPUTS, -1)
        return ops.pack_blocks([from_numpy(blocks)], cast(QuantFormat, format), INPUTS)
    most = 255 if format == "int8_groups" else 15
    shape = OUTPUTS, INPUTS // GROUP_SIZE
    codes = generator.integers(0, most + 1, (OUTPUTS, INPUTS), dtype=np.uint8)
    zeros = generator.integers(0, most + 1, shape, dtype=np.uint8)
    has_zeros = format in ("int4_zeros", "int8_groups")
    part = Codes(
        from_numpy(codes),
        from_numpy(np.full(shape, 0.01, np.float16).astype(np.float32)),
        from_numpy(zeros) if has_zeros else None,
    )
    return ops.pack_quantized(OUTPUTS, INPUTS, cast(QuantFormat, format), GROUP_SIZE, [part])


def main() -> None:
    """Measure all formats in turns, and print the best of the rounds."""
    known = ["bfloat16", *get_args(QuantFormat)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    args = parser.parse_args()
    _native.set_num_threads(1)
    ops = NativeOps()
    weights = {format: make_weight(ops, format) for format in args.formats}
    print(f"{'rows':12}", *(f"{rows:>7}" for rows in args.rows))
    speeds: dict[str, list[float]] = {format: [] for format in weights}
    for rows in args.rows:
        numbers = np.random.default_rng(1).normal(size=(rows, INPUTS))
        x = from_numpy(numbers.astype(ml_dtypes.bfloat16))
        best = dict.fromkeys(weights, float("inf"))
        repeats = max(1, 100 // rows)
        for _ in range(ROUNDS):
            for format, weight in weights.items():
                started = time.thread_time()
                for _ in range(repeats):
                    ops.linear(x, weight)
                best[format] = min(best[format], (time.thread_time() - started) / repeats)
        for format, seconds in best.items():
            speeds[format].append(2 * rows * OUTPUTS * INPUTS / seconds / 1e9)
    for format, row in speeds.items():
        print(f"{format:12}", *(f"{speed:7.1f}" for speed in row))


if __name__ == "__main__":
    main()
