"""Torch's tensors beside the host's: conversions, and the CPU operations for torch's tensors."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.system.tensor import HostTensor, from_dlpack, from_numpy


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of torch's type."""
    return str(dtype).removeprefix("torch.")


def as_torch(x: HostTensor | NDArray[Any]) -> torch.Tensor:
    """Return torch's tensor on the same memory; never write to it if the memory is read-only."""
    tensor = x if isinstance(x, HostTensor) else from_numpy(x)
    if tensor.dtype.startswith("float8"):  # torch's DLPack lacks them
        return as_torch(tensor.view("uint8")).view(torch_dtype(tensor.dtype))
    # DLPack drops the strides of dimensions with one element.
    strides = [tensor.stride(dim) for dim in range(tensor.ndim)]
    assert min(strides, default=0) >= 0, "torch, which has no negative strides, would abort"
    return torch.utils.dlpack.from_dlpack(tensor).as_strided(tensor.shape, strides)


def from_torch(x: torch.Tensor) -> HostTensor:
    """Return the tensor of the host on the same memory."""
    if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
        return from_dlpack(x.view(torch.uint8)).view(dtype_name(x.dtype))
    return from_dlpack(x.detach())


class Copying:
    """`HostCopy` from a GPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._copy.copy_(x, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        """Implement `HostCopy`."""
        return bool(self._event.query())

    def numpy(self) -> NDArray[Any]:
        """Implement `HostCopy`."""
        self._event.synchronize()
        array: NDArray[Any] = self._copy.numpy()
        return array


class WithTorch:
    """Methods of an object for the host's tensors, called with torch's tensors.

    Arguments and results share their memory. Types of torch are converted to their names.

    Args:
        inner: the object, such as `NativeOps`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; a method is wrapped."""
        return _to(getattr(self.inner, name))


class ForHost:
    """Methods of an object for torch's tensors, called with those of the host.

    Args:
        inner: the object, such as `ReferenceAttention`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; a method is wrapped."""
        return _from(getattr(self.inner, name))


def change_with_torch(
    ops: Ops, array: NDArray[np.float32], change: Callable[[Ops, Any], object]
) -> None:
    """Call `change` with CPU operations for torch's tensors, and an array as such a tensor.

    Torch computes on the calling thread: a second pool would compete for the cores, and sums would
    depend on the number of threads.
    """
    torch.set_num_threads(1)
    with torch.no_grad():
        change(cast(Ops, WithTorch(ops)), torch.from_numpy(array))


def _from(x: Any) -> Any:
    """Return x with torch's tensors replaced by the host's, and torch's types by their names."""
    if isinstance(x, torch.Tensor):
        return from_torch(x)
    return dtype_name(x) if isinstance(x, torch.dtype) else _convert(x, _from, _to)


def _to(x: Any) -> Any:
    """Return x with the host's tensors replaced by torch's."""
    return as_torch(x) if isinstance(x, HostTensor) else _convert(x, _to, _from)


def _convert(x: Any, convert: Callable[[Any], Any], back: Callable[[Any], Any]) -> Any:
    """Return x with its parts, or the results of a function, converted.

    Args:
        x: a list, a tuple, a dataclass, a function, or another value, which stays the same.
        convert: converts a part or a result.
        back: converts an argument of a function.
    """
    if isinstance(x, list | tuple):
        return type(x)(map(convert, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = (field.name for field in dataclasses.fields(x) if field.init)
        return dataclasses.replace(x, **{name: convert(getattr(x, name)) for name in fields})
    if isinstance(x, types.FunctionType | types.MethodType):

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [back(arg) for arg in (*args, *kwargs.values())]
            result = x(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
            for own, other in zip((*args, *kwargs.values()), given, strict=True):
                if result is other:
                    return own
            return convert(result)

        return call
    return map(convert, x) if isinstance(x, Iterator) else x


def into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Return the result, copied to `out` if that is given."""
    return result if out is None else out.copy_(result)
