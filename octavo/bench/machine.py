"""What the machine can do: the roofline's roof.

Each limit is the best that any of several ways reached, and not all of them are Octavo's own: a
kernel that reads or multiplies badly must look bad, not lower the roof it is judged by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter

import numpy as np
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.quantization.base import get_quantization

_READS = {"plain read": -1, "read nta": 0, "read t2": 1, "read t1": 2, "read t0": 3}
"""Ways of `_native.read_memory`: without fetching ahead, and with x86's names of its kinds."""
_LEAST_ROUNDS = 3
_HOPELESS = 4.0
"""A product that takes so many times as long as another one is not tried at full size."""


@dataclass(frozen=True)
class Machine:
    """The limits of a kernel (Williams, Waterman and Patterson 2009, "Roofline").

    Attributes:
        bandwidth: bytes a second that can be read from memory.
        peak: floating-point operations a second of a matrix product.
        dtype: of that product: a dtype's name, or "int8" or "int4".
        bandwidth_by: how memory was read that fast.
        peak_by: whose product it was: "Octavo" or "torch".
    """

    bandwidth: float
    peak: float
    dtype: str
    bandwidth_by: str
    peak_by: str

    def floor(self, nbytes: float, flops: float) -> float:
        """The least time in seconds that this much work can take."""
        return max(nbytes / self.bandwidth, flops / self.peak)

    def best(self, other: Machine) -> Machine:
        """Of two measurements of a machine the better one of each limit."""
        memory = max(self, other, key=attrgetter("bandwidth"))
        product = max(self, other, key=attrgetter("peak"))
        return replace(product, bandwidth=memory.bandwidth, bandwidth_by=memory.bandwidth_by)


def measure_machine(dtype: str, quantization: str | None = None) -> Machine:
    """Measures the machine with as many threads as kernels use now, for a few seconds.

    Args:
        dtype: of the model: "float32", "float16" or "bfloat16".
        quantization: form of the linear weights, as in `ModelConfig`.
    """
    bandwidth, bandwidth_by = measure_bandwidth()
    peak, peak_by = measure_peak(dtype, quantization)
    return Machine(bandwidth, peak, quantization or dtype, bandwidth_by, peak_by)


def measure_bandwidth(nbytes: int = 320 * 2**20, seconds: float = 2.0) -> tuple[float, str]:
    """Bytes a second that can be read from memory, and how: the best of some plain reads.

    Args:
        nbytes: how much is read at once, a multiple of 64; it should be far more than the caches.
        seconds: how long to measure, about.
    """
    memory = map_memory(nbytes).fill_(1)  # pages that nothing was written to are all one
    ways: dict[str, Callable[[], object]] = {
        name: partial(_native.read_memory, memory.data_ptr(), nbytes, locality)
        for name, locality in _READS.items()
    }
    by, taken = _quickest(ways, seconds)
    return nbytes / taken, by


def measure_peak(
    dtype: str, quantization: str | None = None, *, size: int = 2048, seconds: float = 2.0
) -> tuple[float, str]:
    """Operations a second of a matrix product, and whose: the better of Octavo's and torch's.

    Torch's is oneDNN's or MKL's. For quantized weights it is that of 8-bit integers.

    Args:
        dtype: see `measure_machine`.
        quantization: see there.
        size: the product has this many rows, inputs and outputs.
        seconds: how long to measure, about.
    """
    ops = NativeOps()
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(_native.num_threads())
    try:
        with torch.inference_mode():
            x = torch.randn(size, size, generator=generator).to(getattr(torch, dtype))
            form = get_quantization(quantization)
            weight = ops.pack_weight(x) if form is None else form.pack(ops, [x])
            products: dict[str, Callable[[Tensor], Tensor]] = {
                "Octavo": lambda x: ops.linear(x, weight),
                "torch": lambda rows: torch.nn.functional.linear(rows, x),
            }
            if form is not None:
                codes = (x.float() * 32).clamp(-127, 127).to(torch.int8)
                products["torch"] = lambda rows: torch._int_mm(codes[: len(rows)], codes.t())
            # Torch has plain loops for what its libraries lack here: they could take a minute.
            some = x[: max(1, size // 8)]
            tried = {name: _seconds(partial(f, some)) for name, f in products.items()}
            ways: dict[str, Callable[[], object]] = {
                name: partial(f, x)
                for name, f in products.items()
                if tried[name] <= _HOPELESS * min(tried.values())
            }
            by, taken = _quickest(ways, seconds)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / taken, by


def _quickest(ways: dict[str, Callable[[], object]], seconds: float) -> tuple[str, float]:
    """Of ways that take turns for some seconds: the quickest, and its seconds.

    Of a way's times, the lower quartile counts. The least would be misleading: on a machine with
    other users, memory is at times twice as fast as it is mostly.
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
    """Seconds of the second of two runs: meanwhile threads of what ran before go to sleep."""
    run()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
