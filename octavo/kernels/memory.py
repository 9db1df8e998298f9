"""Memory of the host: mapped pages, and the buffers of a recorded step."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.system.tensor import HostTensor, Tensor, empty, from_numpy, itemsize, numpy_dtype

_ALIGNMENT = 64  # a cache line
_HUGE_PAGE = 2 * 2**20


def map_memory(nbytes: int) -> HostTensor:
    """Map zeroed memory: uint8 [nbytes], at the beginning of a page.

    The system allocates its pages on the first write, as huge pages where available: reading a
    model's weights touches far more small pages than the TLB holds. The rest that does not fill a
    huge page uses small pages, so that the memory is not larger than requested.
    """
    if nbytes == 0:
        return empty(0, dtype="uint8")
    huge = nbytes >= _HUGE_PAGE
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    memory = mmap.mmap(-1, nbytes + (_HUGE_PAGE if huge else 0), **private)
    tensor = from_numpy(np.frombuffer(memory, np.uint8))
    if not huge:
        return tensor
    start = -tensor.data_ptr() % _HUGE_PAGE
    end = start + nbytes // _HUGE_PAGE * _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end)
    return tensor[start : start + nbytes]


def release_memory(tensor: Tensor) -> None:
    """Return the pages of mapped memory to the system.

    The tensor keeps its address, and its contents become zeros. The system allocates pages again on
    the next write. On Linux only whole pages are returned; elsewhere the contents are set to zero.
    """
    if sys.platform == "linux":
        _native.release_pages(tensor.data_ptr(), tensor.nbytes)
    else:
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)


class _Nowhere:
    __array_interface__: ClassVar = {
        "version": 3,
        "typestr": "|u1",
        "shape": (2**62,),
        "data": (_HUGE_PAGE, False),
    }


_NOWHERE: NDArray[np.uint8] = np.asarray(_Nowhere())


def placeholder(*shape: int, dtype: str) -> HostTensor:
    """Return a tensor without memory, for calls that are recorded and never run; do not read it."""
    nbytes = math.prod(shape) * itemsize(dtype)
    return from_numpy(_NOWHERE[:nbytes]).view(dtype).view(shape)


def borrow(tensor: Tensor) -> NDArray[Any]:
    """Return an array on the memory of a dense tensor, which it does not keep alive.

    It is for code that is a part of a recorded step, and reads the memory in its turn.
    """
    assert tensor.is_contiguous()
    raw = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array: NDArray[Any] = np.ctypeslib.as_array(raw).view(numpy_dtype(tensor.dtype))
    return array.reshape(tuple(tensor.shape))


class Arena:
    """Allocator of buffers that share memory if their lifetimes do not overlap.

    A recorded step runs repeatedly with the addresses of its recording, so the memory of its
    intermediate results must stay. The place of a buffer is free when the last tensor on it is
    deleted. The next buffer uses the first free place that is large enough.

    Args:
        nbytes: size of all buffers that live at the same time, including gaps. None: the arena is
            unlimited and has no memory, so that a recording can measure `peak`. The same recording
            in an arena of that size puts each buffer at the same place.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self._memory: NDArray[np.uint8] = _NOWHERE if nbytes is None else map_memory(nbytes).numpy()
        self._free = [(0, len(self._memory))]  # (offset, size), ascending, never adjacent
        self.peak = 0
        """Largest number of bytes in use at one time."""

    def empty(self, *shape: int, dtype: str) -> HostTensor:
        """Return an uninitialized tensor in a free place."""
        nbytes = math.prod(shape) * itemsize(dtype)
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        index = next((i for i, (_, free) in enumerate(self._free) if free >= size), None)
        assert index is not None, "the activations exceed the memory plan"
        offset, free = self._free[index]
        self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
        self.peak = max(self.peak, offset + size)
        buffer = self._memory[offset : offset + nbytes]
        # All views of the tensor keep `buffer` alive.
        weakref.finalize(buffer, self._release, offset, size).atexit = False
        return from_numpy(buffer).view(dtype).view(shape)

    def _release(self, offset: int, size: int) -> None:
        spans = sorted([*self._free, (offset, size)])
        self._free = spans[:1]
        for start, length in spans[1:]:
            last_start, last_length = self._free[-1]
            if last_start + last_length == start:
                self._free[-1] = (last_start, last_length + length)
            else:
                self._free.append((start, length))
