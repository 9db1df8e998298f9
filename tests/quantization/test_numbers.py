"""Numbers of quantized weights: those that the CPU's kernels multiply with."""

from typing import Any

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.weights import Codes, QuantFormat
from octavo.quantization.numbers import NumberOps
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.tensor import from_numpy

N, K = 70, 200
FORMATS: list[tuple[QuantFormat, int]] = [
    ("int8", 0),
    ("int8_groups", 64),
    ("int4", 32),
    ("int4_levels", 64),
    ("int4_zeros", 128),
    ("nf4", 64),
    ("fp8", 0),
    ("fp8", 128),
]


def products(packed: Any, k: int) -> np.ndarray[Any, Any]:
    """Return the products with the unit matrix, whose rows 8 bits represent exactly."""
    ops = NativeOps()
    unit = from_numpy(np.eye(k, dtype=np.float32))
    return ops.to_host(ops.linear(unit, packed)).T


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "ordered"])
def test_codes(format: QuantFormat, group: int, ordered: bool) -> None:
    """Of several parts, also with an order of the inputs."""
    rng = np.random.default_rng(1)
    # No form of FP8 has an order.
    order = rng.permutation(K).astype(np.int32) if ordered and format != "fp8" else None
    groups, levels = -(-K // (group or K)), 256 if format[:4] in ("int8", "fp8") else 16
    parts = []
    for rows in (N - 9, 9):
        codes = rng.integers(0, levels, (rows, K)).astype(np.uint8)
        if format == "fp8":
            codes[codes & 0x7F == 0x7F] = 0  # NaN
        scales = rng.random((rows, groups), np.float32).astype(np.float16).astype(np.float32)
        scales *= np.float32(2**-15 if format == "nf4" else 1)
        zeros = None
        if format in ("int4_zeros", "int8_groups"):
            zeros = from_numpy(rng.integers(0, levels, (rows, groups)).astype(np.uint8))
        parts.append(Codes(from_numpy(codes), from_numpy(scales), zeros))
    found = NumberOps("float32").pack_quantized(N, K, format, group, parts, order=order).data
    packed = NativeOps().pack_quantized(N, K, format, group, parts, order=order)
    expected = products(packed, K)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-30)
    assert len(np.unique(expected)) > 16
    half = NumberOps("float16").pack_quantized(N, K, format, group, parts, order=order).data
    assert np.array_equal(half.numpy(), found.numpy().astype(np.float16))


@pytest.mark.parametrize("block_type", ["q4_0", "q6_k", "iq4_nl", "mxfp4"])
def test_blocks(block_type: QuantFormat) -> None:
    size, rng = BLOCK_TYPES[block_type], np.random.default_rng(2)
    k = 3 * size.numbers
    raw = rng.integers(0, 60, (N, 3 * size.nbytes)).astype(np.uint8)  # scales are finite
    blocks = [from_numpy(raw[:40]), from_numpy(raw[40:])]
    found = NumberOps("float32").pack_blocks(blocks, block_type, k).data.numpy()
    expected = products(NativeOps().pack_blocks(blocks, block_type, k), k)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())
