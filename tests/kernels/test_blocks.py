"""Block types of GGUF: dequantization, packing, products and rows of a table."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.kernels import native
from octavo.kernels.dequantize import dequantize
from octavo.kernels.sizes import quantized_nbytes
from octavo.kernels.weights import QuantizedWeight
from octavo.system.block_types import BLOCK_TYPES
from tests.torch_ops import native_ops, reference_ops, with_outliers

ops, reference = native_ops(), reference_ops()
pytestmark = pytest.mark.usefixtures("isa")
types = pytest.mark.parametrize("block_type", BLOCK_TYPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Positions of the float16 numbers of a block; others have them at 0, and minima at 2."""


def random_blocks(
    n: int, k: int, block_type: str, seed: int = 0, byte: int | None = None
) -> torch.Tensor:
    """Return bytes [n, bytes], random or all the same, with scales and minima of about 0.01."""
    rng = np.random.default_rng(seed)
    size = BLOCK_TYPES[block_type]
    blocks = rng.integers(0, 256, (n, k // size.numbers, size.nbytes), dtype=np.uint8)
    if byte is not None:
        blocks[:] = byte
    if block_type == "mxfp4":
        blocks[..., 0] = rng.integers(115, 125, blocks.shape[:2])
    elif block_type == "nvfp4":
        blocks[..., :4] = rng.normal(0, 1e-4, (n, 1, 1)).astype(np.float32).view(np.uint8)
        blocks[..., 4:6] = np.minimum(blocks[..., 4:6] & 127, 126) | blocks[..., 4:6] & 128
    else:
        both = block_type in ("q4_1", "q5_1")
        for at in HALVES.get(block_type, (0, 2) if both else (0,)):
            scales = rng.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = scales.view(np.uint8)
    if block_type.endswith("_levels"):
        blocks[..., 2:-128] &= 31
    return torch.from_numpy(blocks.reshape(n, -1))


def pack(blocks: torch.Tensor, block_type: str, k: int) -> QuantizedWeight:
    return ops.pack_blocks([blocks], block_type, k)


@pytest.mark.parametrize("block_type", [name for name in BLOCK_TYPES if name != "nvfp4"])
def test_dequantize_equals_the_gguf_package(block_type: str):
    if block_type.endswith("_levels"):
        pytest.skip("tests/checkpoints/gguf/test_repack.py compares the types that are repacked")
    quants = pytest.importorskip("gguf.quants", reason="needs the package gguf")
    kind = quants.GGMLQuantizationType[block_type.upper()]
    blocks = random_blocks(3, 512, block_type).numpy()
    expected = quants.dequantize(blocks, kind)
    np.testing.assert_allclose(dequantize(blocks, block_type), expected, rtol=1e-6, atol=1e-7)


def test_dequantize_nvfp4():
    blocks = random_blocks(3, 64, "nvfp4").numpy()
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = np.empty((3, 2, 32), np.float32)
    for row, column in np.ndindex(3, 2):
        block = blocks.reshape(3, 2, 22)[row, column]
        scales = block[4:6].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        for i, byte in enumerate(block[6:]):
            expected[row, column, i] = (
                numbers[byte & 15] * scales[0] * block[:4].view(np.float32)[0]
            )
            expected[row, column, i + 16] = (
                numbers[byte >> 4] * scales[1] * block[:4].view(np.float32)[0]
            )
    np.testing.assert_allclose(dequantize(blocks, "nvfp4"), expected.reshape(3, 64), rtol=1e-6)


@types
@dtypes
def test_rows_of_a_table(block_type: str, dtype: torch.dtype):
    n, k = 70, 512
    blocks = random_blocks(n, k, block_type)
    ids = torch.tensor([0, 69, 17, -1, 70, 64])
    rows = ops.embedding(pack(blocks, block_type, k), ids, dtype)
    expected = torch.from_numpy(dequantize(blocks.numpy(), block_type))
    known = (ids >= 0) & (ids < n)
    # A minimum is added by one rounding less.
    exact = block_type not in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 1e-6}
    torch.testing.assert_close(rows[known], expected[ids[known]].to(dtype), **close)
    assert rows[~known].isnan().all()


SHAPES = [
    (0, 8, 768),
    (1, 1, 768),
    (2, 130, 768),
    (5, 64, 768),
    (7, 65, 768),
    (100, 96, 768),
    (400, 33, 256),
]


@functools.lru_cache(len(SHAPES))  # for all instruction sets
def linear_case(block_type: str, m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return blocks, x, a bias and the reference's product."""
    blocks = random_blocks(n, k, block_type, seed=m)
    x = with_outliers(torch.randn(m, k, generator=torch.Generator().manual_seed(m))).to(dtype)
    bias = torch.linspace(-1, 1, n).to(dtype)
    weight = reference.pack_blocks([blocks], block_type, k)
    return [blocks, x, bias, reference.linear(x, weight, bias, "float32")]


@types
def test_linear(block_type: str):
    """The types of x take turns, so that each occurs with each shape."""
    turn = list(BLOCK_TYPES).index(block_type)
    for i, (m, n, k) in enumerate(SHAPES):
        dtype = DTYPES[(turn + i) % 3]
        blocks, x, bias, expected = linear_case(block_type, m, n, k, dtype)
        found = ops.linear(x, pack(blocks, block_type, k), bias, "float32")
        most = max(1.0, float(expected.abs().max())) if m else 1.0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * most)


@types
@pytest.mark.parametrize("byte", [0, 0x77, 0x80, 0xFF])
def test_largest_products(block_type: str, byte: int):
    """The largest sums of products that some instruction sets make in 16 bits."""
    n, k = 16, 512
    blocks = random_blocks(n, k, block_type, byte=byte)
    weight, expected = (t.pack_blocks([blocks], block_type, k) for t in (ops, reference))
    for x in (torch.ones(1, k), -torch.ones(1, k), torch.ones(19, k)):
        y = reference.linear(x, expected)
        torch.testing.assert_close(ops.linear(x, weight), y, rtol=1e-5, atol=1e-5 * y.abs().max())


@types
def test_a_row_has_the_same_bits_among_other_rows(block_type: str):
    n, k = 128, 512
    weight = pack(random_blocks(n, k, block_type), block_type, k)
    x = with_outliers(torch.randn(97, k, generator=torch.Generator().manual_seed(1))).bfloat16()
    whole = ops.linear(x, weight)
    gated = ops.linear_act_and_mul(x, weight, None, "silu")
    assert torch.equal(gated, ops.act_and_mul(whole, "silu"))
    for begin, end in ((0, 1), (3, 5), (7, 13), (0, 40)):
        assert torch.equal(ops.linear(x[begin:end], weight), whole[begin:end])
    native.set_num_threads(1)
    try:
        assert torch.equal(ops.linear(x, weight), whole)
    finally:
        native.set_num_threads(0)


@types
def test_pack_in_parts(block_type: str):
    n, k = 100, 256
    blocks = random_blocks(n, k, block_type)
    whole = pack(blocks, block_type, k)
    parts = ops.pack_blocks([blocks[:7], blocks[7:66], blocks[66:]], block_type, k)
    x = torch.eye(k)[:40]
    assert torch.equal(ops.linear(x, whole), ops.linear(x, parts))
    assert whole.nbytes == quantized_nbytes(n, k, block_type, 0)
