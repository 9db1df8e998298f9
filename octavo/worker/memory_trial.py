"""Trial of this machine's memory: its bandwidth."""

from __future__ import annotations

import time

import numpy as np

from octavo.kernels.native import NativeOps
from octavo.kernels.sizes import PANEL
from octavo.quantization.base import PackedShape
from octavo.quantization.plain import PLAIN
from octavo.system.tensor import HostTensor, full

_INPUTS = 2048
LEAST_NBYTES = 2 * _INPUTS * PANEL
"""Least bytes of the memory."""
_SECONDS = 0.06


def read_bandwidth(memory: HostTensor) -> float:
    """Return the bytes per second that the kernel threads read.

    They compute the product of one row with a weight that fills the memory. The lower quartile of
    the times counts: with other users, memory is sometimes much faster than usual.

    Args:
        memory: uint8 [`LEAST_NBYTES` or more]; it has pages.
    """
    ops, outputs = NativeOps(), memory.nbytes // LEAST_NBYTES * PANEL
    shape = PackedShape(outputs, _INPUTS, "bfloat16")
    weight = PLAIN.wrap(memory[: PLAIN.nbytes(shape)], shape)
    x, out = full((1, _INPUTS), 1.0, "bfloat16"), full((1, shape.n), 0.0, "bfloat16")
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(taken) < 4 or time.perf_counter() < end:
        begin = time.perf_counter()
        ops.linear(x, weight, out=out)
        taken.append(time.perf_counter() - begin)
    return weight.data.nbytes / float(np.percentile(taken[1:], 25))
