"""Torch's tensors beside the host's: conversions, and the CPU operations for torch's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [_from(arg) for arg in args]
            return _to(found(*given, **{key: _from(arg) for key, arg in kwargs.items()}))

        return call


class ForHost:
    """Methods of an object for torch's tensors, called with those of the host.

    Args:
        inner: the object, such as `ReferenceAttention`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; a method is wrapped."""
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [_to(arg) for arg in args]
            with torch.inference_mode():
                return _from(found(*given, **{key: _to(arg) for key, arg in kwargs.items()}))

        return call


def with_torch(ops: Ops, array: NDArray[np.float32]) -> tuple[Ops, torch.Tensor]:
    """Return CPU operations for torch's tensors, and an array as such a tensor."""
    return cast(Ops, WithTorch(ops)), torch.from_numpy(array)


def _from(x: Any) -> Any:
    return _convert(x, torch.Tensor, from_torch, torch.dtype, dtype_name)


def _to(x: Any) -> Any:
    return _convert(x, HostTensor, as_torch, (), lambda dtype: dtype)


def _convert(
    x: Any, tensor: Any, change: Callable[[Any], Any], dtype: Any, name: Callable[[Any], Any]
) -> Any:
    """Return x with the tensors in it, and those in its fields, changed."""
    if isinstance(x, tensor):
        return change(x)
    if isinstance(x, dtype):
        return name(x)
    if isinstance(x, list | tuple):
        return type(x)(_convert(part, tensor, change, dtype, name) for part in x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        values = {
            field.name: _convert(getattr(x, field.name), tensor, change, dtype, name)
            for field in dataclasses.fields(x)
            if field.init
        }
        return dataclasses.replace(x, **values)
    return x
