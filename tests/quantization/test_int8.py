from octavo.quantization.base import PackedShape
from octavo.quantization.int8 import Int8


def test_nbytes() -> None:
    """A byte a weight and a float a row; rows in panels of 64, columns in tiles of 64."""
    assert Int8().nbytes(PackedShape(1024, 2048, "float32")) == 1024 * 2048 + 1024 * 4
    assert Int8().nbytes(PackedShape(1, 1, "float32")) == 64 * 64 + 64 * 4
