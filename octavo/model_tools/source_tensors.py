"""Float tensors of a checkpoint that is converted, read in parts of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, Tensors
from octavo.errors import ModelError
from octavo.system.tensor import numpy_dtype

_NUMBERS = 2**20
"""Numbers that are converted at a time."""
_LARGEST_HALF = 65504.0


def row_ranges(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the rows [begin, end) of parts of a tensor that are converted at a time.

    Args:
        shape: shape of the tensor.
        multiple: divisor of each `begin`.
    """
    step = max(1, _NUMBERS // int(np.prod(shape[1:])) // multiple) * multiple
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


def read_rows(
    tensors: Tensors,
    source: Source,
    begin: int,
    end: int,
    order: NDArray[np.int64] | None = None,
    *,
    turned: bool = False,
) -> NDArray[np.float32]:
    """Return rows of a tensor in float32.

    Args:
        tensors: the open checkpoint.
        source: the tensor.
        begin: first row.
        end: end of the rows.
        order: index of the row that comes at each place; None: the rows keep their order.
        turned: True if the rows are the columns of the tensor.

    Raises:
        ModelError: a number is not finite.
    """
    tensor = tensors.read(source)
    if tuple(tensor.shape) != source.shape:
        raise ModelError(
            f"{source.name} has the shape {list(tensor.shape)} in place of {list(source.shape)}, "
            "which convert does not support."
        )
    array: NDArray[Any] = tensor.numpy().T if turned else tensor.numpy()
    rows = array[begin:end] if order is None else array[order[begin:end]]
    floats: NDArray[np.float32] = rows.astype(np.float32)  # a copy
    if end == len(array if order is None else order):
        tensors.done(tensor)
    if not np.isfinite(floats).all():
        raise ModelError(
            f"{source.name} has numbers that are not finite; download the model again."
        )
    return floats


def as_bytes(floats: NDArray[np.float32], dtype: str, name: str) -> bytes:
    """Return the numbers of a tensor in a type.

    Raises:
        ModelError: a number is too large for the type.
    """
    with np.errstate(over="ignore"):
        converted: NDArray[Any] = floats.astype(numpy_dtype(dtype))
    if not np.isfinite(converted.astype(np.float32)).all():
        raise ModelError(
            f"{name} has the number {float(np.abs(floats).max()):.4g}, which {dtype} cannot hold; "
            "choose another type."
        )
    return converted.tobytes()


def require_float16(floats: NDArray[np.float32], name: str) -> None:
    """Check that scales in float16 can hold the numbers of a tensor.

    Raises:
        ModelError: a number is too large.
    """
    largest = float(np.abs(floats).max())
    if largest > _LARGEST_HALF:
        raise ModelError(
            f"{name} has the number {largest:.4g}, which is too large for scales in float16; "
            "choose another type, or download the model again."
        )
