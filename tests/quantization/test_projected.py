"""Projections of a table, from plain and from quantized checkpoints, whole and of a rank."""

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.quantization.base import PackedShape
from octavo.quantization.dequantized import Dequantized
from octavo.quantization.fp8 import FP8
from octavo.quantization.plain import PLAIN
from octavo.quantization.projected import ProjectedTable
from octavo.system.tensor import HostTensor, from_numpy
from tests.quantization.test_fp8 import INPUTS, ROWS, module, tensors_of

HEADS, SIZE, ROWS_OF_TABLE, EPS = ROWS // 8, 8, 13, 1e-3


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("bias", "eps"), [(True, EPS), (False, None), (False, EPS)])
def test_heads(bias: bool, eps: float | None, quantized: bool) -> None:
    """Each head multiplies by its own projection of the table; a rank's heads have equal bits."""
    rng = np.random.default_rng(0)
    stored, weight = module(rng, ROWS, INPUTS, "block")
    form = ProjectedTable(Dequantized(FP8((48, 64))) if quantized else PLAIN, SIZE, bias, eps)
    tensors = list(tensors_of(FP8((48, 64)), stored) if quantized else [from_numpy(weight)])
    shapes = (ROWS_OF_TABLE, INPUTS), INPUTS, INPUTS
    table, scale, shift = (rng.standard_normal(shape, np.float32) for shape in shapes)
    term = rng.standard_normal(ROWS, np.float32)
    tensors += [from_numpy(term)] * bias + [from_numpy(table)]
    tensors += [from_numpy(scale), from_numpy(shift)] if eps is not None else []
    assert form.num_tensors == len(tensors)
    rows = table.astype(np.float64)
    if eps is not None:
        deviation = np.sqrt(rows.var(1, keepdims=True) + eps)
        rows = (rows - rows.mean(1, keepdims=True)) / deviation * scale + shift
    product = rows @ weight.T
    if bias:
        product = product + term
    x = rng.standard_normal((5, HEADS, SIZE), np.float32)
    want = np.einsum("thd,rhd->thr", x, product.reshape(ROWS_OF_TABLE, HEADS, SIZE))

    def found(first: int, end: int) -> np.ndarray:
        ops, part = NativeOps(), [slice(first * SIZE, end * SIZE)]
        shape = PackedShape((end - first) * ROWS_OF_TABLE, SIZE, "float32")
        packed = form.pack(ops, form.cut(tensors, part, None), shape)
        assert packed.nbytes == form.nbytes(shape)
        query: HostTensor = from_numpy(np.ascontiguousarray(x[:, first:end]))
        return ops.to_host(ops.head_linear(query, packed, end - first))

    np.testing.assert_allclose(found(0, HEADS), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(found(2, 5), found(0, HEADS)[:, 2:5])
