"""Products with quantized weights: compared with the reference, alone and among others, timed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gpu.base import Bench
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.routing import ExpertActivation
from octavo.kernels.triton.ops import TritonOps
from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight

FORMATS: tuple[tuple[QuantFormat, int], ...] = (
    ("int8", 0),
    ("int4_levels", 32),
    ("int4_zeros", 128),
    ("int8_groups", 128),
    ("fp8", 0),
    ("fp8", 128),
)
ROWS = 65
"""Rows of the products that are compared: more than a tile."""
BOUND = 2e-6
"""Largest error of a sum, relative to the sum of the products' magnitudes."""
ROUNDED = 2e-2
"""Largest error of an expert in bfloat16, relative to the largest result."""


def check_quantized(bench: Bench) -> None:
    """Compare and time the product of each format, with activations in bfloat16."""
    gpu, sizes, n = bench.gpu, bench.sizes, bench.sizes.linear
    ops = TritonOps(gpu.device, upcast=gpu.device.type == "cpu")
    reference = ReferenceOps()
    torch.manual_seed(0)
    x = torch.randn(ROWS, n, dtype=torch.bfloat16)
    on_gpu = x.to(gpu.device)
    for format, group in FORMATS:
        what = f"product with {format}{f' in groups of {group}' if group else ''}"
        part = random_codes(n, format, group)
        truth = reference.pack_quantized(n, n, format, group, [part])
        tensors = (part.codes, part.scales, part.zeros)
        moved = Codes(*(None if t is None else t.to(gpu.device) for t in tensors))
        packed = ops.pack_quantized(n, n, format, group, [moved])
        got = ops.linear(on_gpu, packed, None, "float32")
        numbers = (truth.data[..., :-1].double() * truth.data[..., -1:]).flatten(1)[:, :n]
        want = x.double() @ numbers.T
        if format == "int8":  # the sums are exact, and those of the quantized activations
            want = reference.linear(x, truth, None, "float32").double()
        size = x.double().abs() @ numbers.abs().T
        error = ((got.cpu() - want).abs() / size).max().item()
        alone = torch.cat([ops.linear(on_gpu[i : i + 1], packed, None, "float32") for i in (0, 64)])
        bits = torch.equal(alone, got[[0, 64]])
        bench.add(
            f"{what}: error, a row alone and among {ROWS - 1}",
            f"{error:.1e}, {'the same' if bits else 'other'} bits",
            f"{BOUND:.0e}, the same bits",
            error <= BOUND and bits,
        )
        worst, bits = check_experts(ops, on_gpu, packed, got)
        bench.add(
            f"experts with {format}{f' in groups of {group}' if group else ''}: error, alone",
            f"{worst:.1e}, {'the same' if bits else 'other'} bits",
            f"{ROUNDED:.0e}, the same bits",
            worst <= ROUNDED and bits,
        )
        for count in sizes.linear_rows:
            rows = torch.randn(count, n, dtype=torch.bfloat16, device=gpu.device)
            seconds = gpu.seconds(partial(ops.linear, rows, packed))
            share = (packed.nbytes + 2 * rows.nbytes) / seconds / bench.card.bandwidth
            peak = 2 * count * n * n / seconds / bench.card.peak
            bench.add(
                f"kernel: {what}, {count} x {n} x {n}",
                f"{seconds * 1e6:,.0f} us, {peak:.0%} of the matrix peak, {share:.0%} of the "
                "copy's bandwidth",
            )


def check_experts(
    ops: TritonOps, x: Tensor, weight: QuantizedWeight, product: Tensor
) -> tuple[float, bool]:
    """Compare three equal experts with their float32 product, and rows alone with all rows.

    Returns:
        The largest error relative to the largest result, and whether all bits are the same.
    """
    stacked, square = ops.stack([weight] * 3), ExpertActivation("relu2", gated=False)
    ids = torch.arange(2 * len(x), dtype=torch.int32, device=x.device).view(-1, 2) % 3
    rows, places = ops.experts(x, ids, stacked, None, square)
    both = rows[places.long()]
    want = product.relu().square()
    error = ((both - want[:, None]).abs().max() / want.max()).item()
    some = [0, len(x) - 1]
    alone = [ops.experts(x[i : i + 1], ids[i : i + 1], stacked, None, square) for i in some]
    pairs = zip(some, alone, strict=True)
    bits = all(torch.equal(r[p[0].long()], both[i]) for i, (r, p) in pairs)
    return error, bits


def random_codes(n: int, format: QuantFormat, group: int) -> Codes:
    """Return a weight [n, n] whose numbers are all finite."""
    most = 16 if format.startswith("int4") else 256
    codes: Tensor = torch.randint(most, (n, n), dtype=torch.uint8)
    if format == "fp8":
        codes = torch.where(codes & 127 == 127, 0, codes)
    groups = -(-n // (group or n))
    scales = (torch.rand(n, groups) / 64).half().float()
    zeros = torch.randint(most, (n, groups), dtype=torch.uint8)
    return Codes(codes, scales, zeros if format in ("int4_zeros", "int8_groups") else None)
