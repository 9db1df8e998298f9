"""Tensors in mapped files: the system reads them when they are used, and nothing is copied."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo import _native
from octavo.checkpoints.base import Source
from octavo.system.tensor import HostTensor, empty, from_numpy, itemsize


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Name of the type; the file's own name if tensors do not have the type."""
    begin: int = 0
    """Position of its first byte in the file."""
    strides: tuple[int, ...] | None = None
    """Distances of successive elements of each dimension, in bytes; None: the tensor is dense."""
    paired_heads: int = 0
    """Number of heads of a dense tensor whose rotated pairs are successive rows in the file: the
    first rows of all pairs of a head are read before the second ones. 0: rows keep their order."""

    @property
    def transposed(self) -> StoredTensor:
        """A dense matrix, transposed."""
        rows, columns = self.shape
        size = itemsize(self.dtype)
        return replace(self, shape=(columns, rows), strides=(size, columns * size))


class MappedFile:
    """File in memory, which cannot be written to.

    Args:
        file: the file, which is not empty.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self.data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))

    def tensor(self, stored: StoredTensor) -> HostTensor:
        """Return a view of a tensor, which cannot be written to, or a copy in another order."""
        bits = f"u{itemsize(stored.dtype)}"  # numpy lacks some of the types
        array: np.ndarray = np.ndarray(stored.shape, bits, self.data, stored.begin, stored.strides)
        if stored.paired_heads:
            view, rest = array, array.shape[1:]
            pairs = view.reshape(stored.paired_heads, -1, 2, *rest)
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(view.shape)
            _native.release_pages(view.ctypes.data, view.nbytes)
        tensor: HostTensor = from_numpy(array).view(stored.dtype)
        return tensor


class MappedTensors:
    """`Tensors` of mapped files.

    Args:
        stored: all tensors.
        names: the stored name of each expected tensor.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], names: Mapping[str, str]) -> None:
        self._names = names
        self._open = {file: MappedFile(file) for file in {it.file for it in stored.values()}}
        self._stored = stored

    def read(self, source: Source) -> HostTensor:
        """Return a view of the mapped file."""
        if source.optional and source.name not in self._names:
            return empty(0, dtype=source.dtypes[0])
        stored = self._stored[self._names[source.name]]
        tensor = self._open[stored.file].tensor(stored)
        if source.index is None:
            return tensor
        if tensor.dim() < len(source.shape):
            size = tensor.shape[0] // source.shape[0]
            return tensor[source.index * size : (source.index + 1) * size]
        return tensor[source.index]

    def done(self, tensor: HostTensor) -> None:
        """Let the system drop the tensor's pages of the mapped file; a copy has none."""
        if tensor.is_contiguous() and not tensor.numpy().flags.writeable:
            _native.release_pages(tensor.data_ptr(), tensor.nbytes)
