"""Limits of the machine: the roofline's roof.

Each limit is the best result of several methods, and not all of them are Octavo's: a kernel that
reads or multiplies slowly must look slow, not lower its own roof.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter

import numpy as np

from octavo import _native
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.quantization.base import PackedShape
from octavo.quantization.registry import FORMS
from octavo.system.tensor import dense, from_numpy

_READS = {"plain read": -1, "read nta": 0, "read t2": 1, "read t1": 2, "read t0": 3}
"""Localities for `_native.read_memory`: without prefetching, and with x86's kinds by name."""
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Machine:
    """Limits of a kernel (Williams, Waterman and Patterson 2009, "Roofline").

    Attributes:
        bandwidth: bytes per second that can be read from memory.
        peak: floating-point operations per second of a matrix product.
        dtype: type of that product: a dtype's name, or "int8", "int4" or "fp8".
        bandwidth_by: fastest method of reading.
        peak_by: fastest implementation of the product: "Octavo" or "numpy".
    """

    bandwidth: float
    peak: float
    dtype: str
    bandwidth_by: str
    peak_by: str

    def floor(self, nbytes: float, flops: float) -> float:
        """Return the minimum time of this amount of work in seconds."""
        return max(nbytes / self.bandwidth, flops / self.peak)

    def best(self, other: Machine) -> Machine:
        """Return the better of two measurements for each limit."""
        memory = max(self, other, key=attrgetter("bandwidth"))
        product = max(self, other, key=attrgetter("peak"))
        return replace(product, bandwidth=memory.bandwidth, bandwidth_by=memory.bandwidth_by)


def measure_machine(dtype: str, quantization: str | None = None) -> Machine:
    """Measure the machine for a few seconds, with the current number of kernel threads.

    Args:
        dtype: dtype of the model: "float32", "float16" or "bfloat16".
        quantization: format of the linear weights, as in `ModelConfig`; the methods of quantized
            checkpoints count as the dtype.
    """
    if quantization not in FORMS:
        quantization = None
    bandwidth, bandwidth_by = measure_bandwidth()
    peak, peak_by = measure_peak(dtype, quantization)
    return Machine(bandwidth, peak, quantization or dtype, bandwidth_by, peak_by)


def measure_bandwidth(nbytes: int = 320 * 2**20, seconds: float = 2.0) -> tuple[float, str]:
    """Return the bytes per second of reading memory, and the best of several methods.

    Args:
        nbytes: bytes read at once, a multiple of 64; they should far exceed the caches.
        seconds: approximate duration.
    """
    memory = map_memory(nbytes)
    memory.numpy()[...] = 1  # otherwise all pages would be one zero page
    ways: dict[str, Callable[[], object]] = {
        name: partial(_native.read_memory, memory.data_ptr(), nbytes, locality)
        for name, locality in _READS.items()
    }
    by, taken = _quickest(ways, seconds)
    return nbytes / taken, by


def measure_peak(
    dtype: str, quantization: str | None = None, *, size: int = 2048, seconds: float = 2.0
) -> tuple[float, str]:
    """Return the operations per second of a matrix product, the better of Octavo's and numpy's.

    numpy multiplies float32, with its library's threads.

    Args:
        dtype: see `measure_machine`.
        quantization: see `measure_machine`.
        size: number of rows, inputs and outputs of the product.
        seconds: approximate duration.
    """
    ops = NativeOps()
    numbers = np.random.default_rng(0).standard_normal((size, size), np.float32)
    x = dense(from_numpy(numbers), dtype)
    weight = FORMS[quantization].pack(ops, [(x,)], PackedShape(size, size, dtype))
    ways: dict[str, Callable[[], object]] = {"Octavo": lambda: ops.linear(x, weight)}
    if dtype == "float32" and quantization is None:
        ways["numpy"] = lambda: np.matmul(numbers, numbers)
    by, taken = _quickest(ways, seconds)
    return 2 * size**3 / taken, by


def _quickest(ways: dict[str, Callable[[], object]], seconds: float) -> tuple[str, float]:
    """Run several functions in turns for some seconds; return the fastest, and its seconds.

    The measure is the lower quartile of a function's times. The minimum would be misleading: on a
    machine with other users, memory is sometimes twice as fast as usual.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for name, run in ways.items():
            taken[name].append(_seconds(run))
        rounds += 1
    quartiles = {name: float(np.percentile(times, 25)) for name, times in taken.items()}
    return min(quartiles.items(), key=itemgetter(1))


def _seconds(run: Callable[[], object]) -> float:
    """Time the second of two runs: meanwhile other threads go to sleep."""
    run()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
