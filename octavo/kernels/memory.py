"""Memory: mapped pages, the way to a device, and the buffers of a recorded step."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import _native

_ALIGNMENT = 64  # a cache line
_HUGE_PAGE = 2 * 2**20


def map_memory(nbytes: int) -> Tensor:
    """Zeroed memory: uint8 [nbytes], at the beginning of a page.

    The system hands out its pages when they are first written, in huge pages where it has them:
    reading a model's weights touches far more small pages than the processor can keep in mind.
    What does not fill a huge page at the end is in small ones, so that no more is taken than asked.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    huge = nbytes >= _HUGE_PAGE
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    memory = mmap.mmap(-1, nbytes + (_HUGE_PAGE if huge else 0), **private)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if not huge:
        return tensor
    start = -tensor.data_ptr() % _HUGE_PAGE
    end = start + nbytes // _HUGE_PAGE * _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end)
    return tensor[start : start + nbytes]


def release_memory(tensor: Tensor) -> None:
    """Gives the pages of mapped memory back to the system.

    The address stays the tensor's, and its contents are zeros; as with new memory, the system hands
    out pages when they are written again. Only whole pages are given back, and only on Linux:
    elsewhere the contents are set to zero.
    """
    if sys.platform == "linux":
        _native.release_pages(tensor.data_ptr(), tensor.nbytes)
    else:
        tensor.zero_()


class _Nowhere:
    __array_interface__: ClassVar = {
        "version": 3,
        "typestr": "|u1",
        "shape": (2**62,),
        "data": (_HUGE_PAGE, False),
    }


_NOWHERE: NDArray[np.uint8] = np.asarray(_Nowhere())


def placeholder(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, for calls that are recorded and never run: it cannot be read."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(_NOWHERE[:nbytes]).view(dtype).view(shape)


def is_host(device: torch.device) -> bool:
    """Whether tensors of a device are in the host's memory, where nothing is waited for."""
    return device.type == "cpu"


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on a device; nobody waits for what the device still has to do."""
    tensor = torch.from_numpy(array)
    return tensor if is_host(device) else tensor.pin_memory().to(device, non_blocking=True)


class Arena:
    """Buffers that share memory when they do not live at the same time.

    A recorded step runs again and again on the addresses it was recorded with, so the memory of
    its intermediate results must stay. A buffer's place is free again when the last tensor on it
    is gone; the next buffer takes the first free place that is large enough.

    Args:
        nbytes: of all buffers that live at the same time, and of the gaps between them; None: there
            is no memory behind the buffers and no end to them, which a recording finds out `peak`
            with. The same recording in an arena of that size puts each buffer at the same place.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self._memory = _NOWHERE if nbytes is None else map_memory(nbytes).numpy()
        self._free = [(0, len(self._memory))]  # (offset, size), ascending, never adjacent
        self.peak = 0
        """Bytes used at the fullest moment."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor in a free place, its contents undefined."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        index = next((i for i, (_, free) in enumerate(self._free) if free >= size), None)
        assert index is not None, "more activations than the memory plan knows of"
        offset, free = self._free[index]
        self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
        self.peak = max(self.peak, offset + size)
        buffer = self._memory[offset : offset + nbytes]
        # The tensor's storage, which all its views share, keeps `buffer` alive.
        weakref.finalize(buffer, self._release, offset, size).atexit = False
        return torch.from_numpy(buffer).view(dtype).view(shape)

    def _release(self, offset: int, size: int) -> None:
        spans = sorted([*self._free, (offset, size)])
        self._free = spans[:1]
        for start, length in spans[1:]:
            last_start, last_length = self._free[-1]
            if last_start + last_length == start:
                self._free[-1] = (last_start, last_length + length)
            else:
                self._free.append((start, length))
