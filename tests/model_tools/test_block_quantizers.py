"""Quantizers of GGUF's blocks, read by Octavo's dequantizer and, where installed, by gguf's."""

import numpy as np
import pytest

from octavo.kernels.dequantize import dequantize
from octavo.model_tools.block_quantizers import QUANTIZERS, quantize
from octavo.system.block_types import BLOCK_TYPES
from tests.gguf_files import quantize as simplest

ERRORS = {
    "q8_0": 0.0056,
    "q6_k": 0.0182,
    "q5_k": 0.0375,
    "q5_1": 0.0355,
    "q5_0": 0.0422,
    "q4_k": 0.0748,
    "q4_1": 0.0734,
    "q4_0": 0.085,
}
"""Largest relative errors of normal numbers: 5 % more than was measured."""


def error(x, block_type):
    return np.linalg.norm(dequantize(quantize(x, block_type), block_type) - x) / np.linalg.norm(x)


@pytest.mark.parametrize("block_type", QUANTIZERS)
def test_normal_numbers(block_type):
    x = np.random.default_rng(0).normal(0, 0.02, (64, 1024)).astype(np.float32)
    blocks = quantize(x, block_type)
    size = BLOCK_TYPES[block_type]
    assert blocks.shape == (64, 1024 // size.numbers * size.nbytes)
    assert error(x, block_type) < ERRORS[block_type]
    # Any row and any scale alone.
    np.testing.assert_array_equal(quantize(x[7:9], block_type), blocks[7:9])
    assert error(x * np.float32(4096), block_type) < ERRORS[block_type]


@pytest.mark.parametrize("block_type", QUANTIZERS)
def test_the_package_gguf_reads_the_same(block_type):
    gguf = pytest.importorskip("gguf.quants")
    x = np.random.default_rng(1).normal(0.01, 0.02, (8, 512)).astype(np.float32)
    blocks = quantize(x, block_type)
    kind = gguf.GGMLQuantizationType[block_type.upper()]
    theirs = gguf.dequantize(blocks, kind)
    np.testing.assert_array_equal(theirs, dequantize(blocks, block_type))


@pytest.mark.parametrize("block_type", ["q4_0", "q8_0"])
def test_the_search_beats_the_simplest_scales(block_type):
    x = np.random.default_rng(2).standard_t(4, (64, 256)).astype(np.float32)
    simple = np.frombuffer(simplest(x, block_type), np.uint8).reshape(64, -1)
    plain = np.linalg.norm(dequantize(simple, block_type) - x) / np.linalg.norm(x)
    assert error(x, block_type) < (0.97 if block_type == "q4_0" else 1.001) * plain


@pytest.mark.parametrize("block_type", QUANTIZERS)
def test_special_blocks(block_type):
    """Zeros, equal numbers, tiny and huge ones, one outlier: no code leaves its range."""
    x = np.zeros((8, 256), np.float32)
    x[1] = 0.25
    x[2] = -0.25
    x[3] = 1e-30
    x[4] = 3e4 * np.sin(np.arange(256))
    x[5, 17] = 1.0
    x[6] = np.linspace(0.5, 1.0, 256)
    x[7] = np.linspace(-1.0, -0.5, 256)
    found = dequantize(quantize(x, block_type), block_type)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1:3], x[1:3], rtol=0.01)
    np.testing.assert_allclose(found[3], 0, atol=1e-7)
    np.testing.assert_allclose(found[4], x[4], atol=0.13 * 3e4)
    assert found[5, 17] == pytest.approx(1.0, rel=0.02)
    assert np.abs(np.delete(found[5], 17)).max() < 0.04
    np.testing.assert_allclose(found[6:], x[6:], atol=0.07)


@pytest.mark.parametrize("block_type", ["q4_1", "q5_1", "q4_k", "q5_k"])
def test_exact_codes_stay_exact(block_type):
    """Numbers that a block can hold exactly are found again."""
    most = 15 if block_type.startswith("q4") else 31
    codes = np.random.default_rng(3).integers(0, most + 1, (4, 256))
    codes[:, ::32], codes[:, 1::32] = 0, most
    x = (codes * np.float32(0.125) - np.float32(1)).astype(np.float32)
    found = dequantize(quantize(x, block_type), block_type)
    # Scales and minima of q4_k and q5_k are 63 steps of a float16.
    np.testing.assert_allclose(found, x, atol=2e-3)
