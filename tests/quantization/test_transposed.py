"""Heads whose rows are transposed, from plain and from quantized checkpoints."""

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.quantization.base import PackedShape
from octavo.quantization.dequantized import Dequantized
from octavo.quantization.fp8 import FP8
from octavo.quantization.plain import PLAIN
from octavo.quantization.transposed import TransposedHeads
from octavo.system.tensor import from_numpy
from tests.quantization.test_fp8 import INPUTS, ROWS, module, tensors_of

HEADS, BOTH, KEYS = 4, 24, 10


@pytest.mark.parametrize("quantized", [False, True])
def test_heads(quantized: bool) -> None:
    """Each head of a product has the transposed weight of its first rows."""
    stored, weight = module(np.random.default_rng(0), ROWS, INPUTS, "block")
    form = TransposedHeads(Dequantized(FP8((48, 64))) if quantized else PLAIN, HEADS)
    tensors = tensors_of(FP8((48, 64)), stored) if quantized else [from_numpy(weight)]
    rows = [slice(h * BOTH, h * BOTH + KEYS) for h in range(HEADS)]
    shape, ops = PackedShape(HEADS * INPUTS, KEYS, "float32"), NativeOps()
    packed = form.pack(ops, form.cut(tensors, rows, None), shape)
    assert packed.nbytes == form.nbytes(shape)
    unit = from_numpy(np.tile(np.eye(KEYS, dtype=np.float32)[:, None], (1, HEADS, 1)))
    found = ops.to_host(ops.head_linear(unit, packed, HEADS))  # [KEYS, HEADS, INPUTS]
    want = np.stack([weight[part] for part in rows], 1)
    np.testing.assert_allclose(found, want, rtol=2**-21)
