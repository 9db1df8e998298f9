import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.quantization.base import PackedShape
from octavo.quantization.int8 import GroupedInt8, Int8
from octavo.system.tensor import from_numpy

GROUP = 64


def test_nbytes() -> None:
    """A byte a weight and a float a row; rows in panels of 64, columns in tiles of 64."""
    assert Int8().nbytes(PackedShape(1024, 2048, "float32")) == 1024 * 2048 + 1024 * 4
    assert Int8().nbytes(PackedShape(1, 1, "float32")) == 64 * 64 + 64 * 4


def test_nbytes_with_groups() -> None:
    """A byte a weight; a float and a zero point for each row and group."""
    assert GroupedInt8().nbytes(PackedShape(1024, 2048, "float32")) == 1024 * 32 * (GROUP + 5)
    assert GroupedInt8().nbytes(PackedShape(1, 65, "float32")) == 64 * 2 * (GROUP + 5)


def dequantized(*parts: np.ndarray) -> np.ndarray:
    """Return the weights that products use: a row of x with a single 1 is exact in 8 bits."""
    n, k = sum(len(part) for part in parts), parts[0].shape[1]
    shape, ops = PackedShape(n, k, "float32"), NativeOps()
    weight = GroupedInt8().pack(ops, [(from_numpy(part),) for part in parts], shape)
    product = ops.linear(from_numpy(np.eye(k, dtype=np.float32)), weight)
    return np.array(product.numpy()).T


@pytest.mark.parametrize("k", [64, 130, 257])
def test_each_group_of_inputs_has_its_own_scale(k: int) -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(300, k)).astype(np.float32)
    weight[:, :GROUP] *= 1000
    weight[7, :GROUP] = 0
    got = dequantized(weight[:170], weight[170:])
    for begin in range(0, k, GROUP):
        part = weight[:, begin : begin + GROUP]
        most = np.abs(part).max(1, keepdims=True)
        errors = np.abs(got[:, begin : begin + GROUP] - part)
        assert (errors <= most / 127 * 0.5001 + 1e-7).all()
    assert not got[7, :GROUP].any()


@pytest.mark.filterwarnings("error")
def test_nan_stays_visible() -> None:
    weight = np.ones((2, 128), np.float32)
    weight[1, 70] = np.nan
    got = dequantized(weight)
    assert np.isnan(got[1]).any()
    assert np.allclose(got[0], 1)
