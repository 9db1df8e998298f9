"""Tensors: views of numbers in memory.

`HostTensor` is Octavo's own class, for the memory of the host. It has no arithmetic: the kernels
compute, and where speed does not matter numpy does, on `HostTensor.numpy()`. So layers that are
recorded cannot compute by accident. `Tensor` is the part of it that torch's tensors have, too:
layers, models and the worker use only that, so that they run on every device. The table of
operations (`kernels/base.py`) converts between the two.

Types are named by strings, such as "bfloat16".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo._native import Tensor as HostTensor
from octavo._native import empty, from_dlpack, from_numpy, itemsize, zeros

__all__ = [
    "HostTensor",
    "Tensor",
    "concatenate",
    "dense",
    "empty",
    "from_dlpack",
    "from_numpy",
    "full",
    "itemsize",
    "numpy_dtype",
    "round_to",
    "zeros",
]


class Tensor(Protocol):
    """Tensor of any device: what `HostTensor` and `torch.Tensor` have in common.

    Strides count elements. Views share the memory.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...

    @property
    def dtype(self) -> Any:
        """Type of the numbers: its name, or torch's type."""
        ...

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        ...

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return a view: integers, slices, None and ... only."""
        ...

    def dim(self) -> int:
        """Return the number of dimensions."""
        ...

    def numel(self) -> int:
        """Return the number of elements."""
        ...

    def stride(self, dim: int, /) -> int:
        """Return the distance of successive elements of a dimension."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        ...

    def is_contiguous(self) -> bool:
        """Return True if the elements lie densely in the order of their indices."""
        ...

    def view(self, *shape: Any) -> Any:
        """Return the same elements in another shape, or the same bytes as another type."""
        ...

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> Sequence[Any]:
        """Return successive parts of a dimension."""
        ...

    def unbind(self, dim: int = 0) -> Sequence[Any]:
        """Return a view for each index of a dimension."""
        ...


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's type; those that numpy lacks, such as bfloat16, come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only needed for the numbers of such types

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def round_to(number: float, dtype: str) -> float:
    """Return the nearest number of a type."""
    return float(np.asarray(number).astype(numpy_dtype(dtype)))


def full(shape: Sequence[int], value: float, dtype: str) -> HostTensor:
    """Return a tensor of equal numbers."""
    tensor = empty(*shape, dtype=dtype)
    tensor.numpy()[...] = value
    return tensor


def dense(tensor: HostTensor, dtype: str | None = None) -> HostTensor:
    """Return the tensor in a type with its elements in order; a copy only if it differs."""
    array: NDArray[Any] = tensor.numpy()
    if dtype is not None and dtype != tensor.dtype:
        with np.errstate(all="ignore"):  # numbers beyond the type become infinite
            array = array.astype(numpy_dtype(dtype))
    elif tensor.is_contiguous():
        return tensor
    return from_numpy(np.ascontiguousarray(array))


def concatenate(tensors: Sequence[HostTensor], dim: int = 0) -> HostTensor:
    """Return a copy of tensors of one type, one after the other along a dimension."""
    return from_numpy(np.concatenate([tensor.numpy() for tensor in tensors], dim))
