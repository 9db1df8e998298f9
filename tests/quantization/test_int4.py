from octavo.kernels.native import NativeOps
from octavo.quantization.base import PackedShape
from octavo.quantization.int4 import SMALL, Int4
from octavo.quantization.int8 import Int8
from octavo.system.tensor import HostTensor, full


def test_nbytes() -> None:
    """Half a byte a weight and two bytes a group; columns in groups of 32."""
    assert Int4().nbytes(PackedShape(1024, 2048, "float32")) == 1024 * 2048 * 9 // 16
    assert Int4().nbytes(PackedShape(1024, 2050, "float32")) == 1024 * 2080 * 9 // 16


def test_small_layers_are_int8() -> None:
    k = 64
    n = SMALL // k
    large, small = PackedShape(n, k, "float32"), PackedShape(n - 1, k, "float32")
    ops = NativeOps()

    def ones(rows: int) -> tuple[HostTensor]:
        return (full((rows, k), 1.0, "float32"),)

    assert Int4().pack(ops, [ones(n)], large).format == "int4_levels"
    # The layer counts, not its parts.
    assert Int4().pack(ops, [ones(n // 2)] * 2, large).format == "int4_levels"
    assert Int4().pack(ops, [ones(n - 1)], small).format == "int8"
    assert Int4().nbytes(small) == Int8().nbytes(small)
