"""What the machine can do, measured with Octavo's own kernels and threads: the roofline's roof."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight
from octavo.kernels.ops import get_ops
from octavo.quantization.base import get_quantization

_READ_K, _READ_PART = 8192, 1024


@dataclass(frozen=True)
class Machine:
    """The limits of a kernel (Williams, Waterman and Patterson 2009, "Roofline").

    Attributes:
        bandwidth: bytes a second that can be read from memory.
        peak: floating-point operations a second of a matrix product.
        dtype: of that product: a dtype's name, or "int8" or "int4".
    """

    bandwidth: float
    peak: float
    dtype: str

    def floor(self, nbytes: float, flops: float) -> float:
        """The least time in seconds that this much work can take."""
        return max(nbytes / self.bandwidth, flops / self.peak)


def measure_machine(
    dtype: str,
    quantization: str | None = None,
    *,
    read_nbytes: int = 320 * 2**20,
    peak_size: int = 2048,
    repeats: int = 30,
) -> Machine:
    """Measures the machine with as many threads as kernels use now.

    Of the repeats' speeds, the upper quartile counts. The best would be misleading: on a machine
    with other users, memory is at times twice as fast as it is mostly.

    Args:
        dtype: of the model: "float32", "float16" or "bfloat16".
        quantization: form of the linear weights, as in `ModelConfig`.
        read_nbytes: a one-row bfloat16 product reads a packed weight of about this size; it should
            be far larger than the caches.
        peak_size: the product for the peak has this many rows, inputs and outputs. Its weight is
            held as the model's are.
        repeats: of each.
    """
    ops = get_ops(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        part = torch.randn(_READ_PART, _READ_K, generator=generator).bfloat16()
        packed = ops.pack_weight([part] * max(1, read_nbytes // part.nbytes))
        bandwidth = packed.nbytes / _seconds(ops, part[:1], packed, repeats)
        del packed, part
        square = torch.randn(peak_size, peak_size, generator=generator).to(getattr(torch, dtype))
        form = get_quantization(quantization)
        weight = ops.pack_weight(square) if form is None else form.pack(ops, [square])
        peak = 2 * peak_size**3 / _seconds(ops, square, weight, repeats)
    return Machine(bandwidth, peak, quantization or dtype)


def _seconds(
    ops: Ops, x: torch.Tensor, weight: PackedWeight | QuantizedWeight, repeats: int
) -> float:
    """Seconds of a product: the lower quartile of some repeats, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        ops.linear(x, weight)
        seconds.append(time.perf_counter() - begin)
    return float(np.percentile(seconds[1:], 25))
