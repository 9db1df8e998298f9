import torch

from octavo.kernels.native import NativeOps
from octavo.quantization.int4 import SMALL, Int4
from octavo.quantization.int8 import Int8


def test_nbytes() -> None:
    """Half a byte a weight and two bytes a group; columns in groups of 32."""
    assert Int4().nbytes(1024, 2048) == 1024 * 2048 * 9 // 16
    assert Int4().nbytes(1024, 2050) == 1024 * 2080 * 9 // 16


def test_small_layers_are_int8() -> None:
    k = 64
    n = SMALL // k
    ops = NativeOps()
    assert Int4().pack(ops, [torch.ones(n, k)]).format == "int4_levels"
    # The layer counts, not its parts.
    assert Int4().pack(ops, [torch.ones(n // 2, k)] * 2).format == "int4_levels"
    assert Int4().pack(ops, [torch.ones(n - 1, k)]).format == "int8"
    assert Int4().nbytes(n - 1, k) == Int8().nbytes(n - 1, k)
