"""Fake GPU: tensors in main memory that claim to be on "cuda:0" and insist on it.

`FakeGpu.call` calls every torch function with such a tensor. Tensors of two devices in one
operation are an error, as on a GPU, and each wait of the host for the device is noted. Triton's
kernels run in its interpreter. So the whole engine runs with device=cuda, except speed, memory and
CUDA graphs.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from octavo.system import device
from octavo.worker import device_steps

CUDA = torch.device("cuda", 0)
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "randn", "rand", "randint")
# Functions after which the host has waited for the device: they return a value, or a shape that
# depends on one.
_WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"),
    *("nonzero", "masked_select", "unique", "is_nonzero", "repeat_interleave"),
}
_MOVES = {"copy_", "to", "cpu", "cuda"}


class GpuTensor(torch.Tensor):
    """Tensor that claims to be on the GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return FakeGpu.current.call(func, args, kwargs or {})


def _plain(x: Any) -> Any:
    return pytree.tree_map_only(GpuTensor, lambda t: t.as_subclass(torch.Tensor), x)


def _on_gpu(x: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(GpuTensor), x)


def _is_cuda(where: Any) -> bool:
    return where is not None and torch.device(where).type == "cuda"


class Event:
    """Stand-in for torch.cuda.Event; no work is done before a wait for it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.done = False

    def record(self, *args: object) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Stream:
    """Stand-in for torch.cuda.Stream: all work is done at once."""

    def __init__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class Graphs:
    """Stand-in for `CudaGraphs`, whose graphs run the function again."""

    def __init__(self, where: torch.device) -> None:
        assert where == CUDA

    def __call__(self, step: Callable[[], None]) -> Any:
        step()
        return Graph(step)


class Graph:
    """Stand-in for a captured torch.cuda.CUDAGraph."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def replay(self) -> None:
        FakeGpu.current.replays += 1
        self._step()


class FakeGpu:
    """Replacement of torch's CUDA."""

    current: FakeGpu

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeGpu.current = self
        self.waits: list[str] = []
        """Operation and place of each wait of the host for the device."""
        self.replays = 0
        """Number of replays of captured steps."""
        self._pinned: set[int] = set()
        self._originals = {name: getattr(torch.Tensor, name) for name in ("to", "pin_memory")}
        patch = monkeypatch.setattr
        for name in _FACTORIES:
            patch(torch, name, self._factory(getattr(torch, name)))
        patch(torch.Tensor, "to", lambda x, *args, **kwargs: self._to(x, args, kwargs))
        patch(torch.Tensor, "pin_memory", lambda x: self._keep_pinned(x.clone()))
        for name, value in {
            "is_available": True,
            "current_device": 0,
            "get_device_capability": (9, 0),
            "get_device_name": "no card at all",
            "memory_allocated": 2**20,
            "max_memory_allocated": 2**23,
            "memory_reserved": 2**21,
            "mem_get_info": (2**28, 2**28),
            "reset_peak_memory_stats": None,
            "synchronize": None,
            "empty_cache": None,
        }.items():
            patch(torch.cuda, name, lambda *_, value=value: value)
        card = type(
            "Properties",
            (),
            {"multi_processor_count": 4, "shared_memory_per_block_optin": 99 * 1024},
        )
        patch(torch.cuda, "get_device_properties", lambda _: card)
        patch(torch.cuda, "Event", Event)
        patch(torch.cuda, "Stream", Stream)
        patch(torch.cuda, "current_stream", Stream)
        patch(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch(device, "num_cuda_devices", lambda: 1)
        patch(device_steps, "CudaGraphs", Graphs)
        self._patch_triton(monkeypatch)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function that has an argument on the GPU."""
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.device.__get__:
                return CUDA
            if func == torch.Tensor.is_cuda.__get__:
                return True
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            if name == "to":
                return self._to(args[0], args[1:], kwargs)
            if name == "cpu":
                return self._to(args[0], ("cpu",), {})
            if name == "copy_":
                self._note_copy(*args, **kwargs)
            else:
                self._check_devices(name, args, kwargs)
            if name in _WAITS or (name in ("__getitem__", "__setitem__") and _has_mask(args[1])):
                self._wait(name)
            to = kwargs.get("device")
            if to is not None:
                kwargs = kwargs | {"device": "cpu"}
            result = func(*_plain(args), **_plain(kwargs))
            host = (name == "copy_" and not isinstance(args[0], GpuTensor)) or not (
                to is None or _is_cuda(to)
            )
            return result if host else _on_gpu(result)

    def _wait(self, what: str) -> None:
        stack = [f for f in traceback.extract_stack() if f.filename != __file__]
        place = next((f for f in reversed(stack) if "/octavo/" in f.filename), stack[-1])
        self.waits.append(f"{what} in {place.filename}:{place.lineno}")

    def _check_devices(self, name: str, args: Any, kwargs: Any) -> None:
        """Check devices more strictly than torch: it would move an index, and wait for that."""
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not isinstance(x, GpuTensor) and x.dim() > 0:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on the same device, but found at least "
                    "two devices, cuda:0 and cpu"
                )

    def _note_copy(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> None:
        for host in (to, source):
            if not isinstance(host, GpuTensor) and not (non_blocking and self._is_pinned(host)):
                self._wait("copy_")

    def _is_pinned(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._pinned

    def _keep_pinned(self, x: torch.Tensor) -> torch.Tensor:
        self._pinned.add(x.untyped_storage().data_ptr())
        return x

    def _to(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Run Tensor.to, between devices or not."""
        if args and isinstance(args[0], torch.Tensor):
            raise NotImplementedError
        where, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        was_on_gpu = isinstance(x, GpuTensor)
        to_gpu = was_on_gpu if where is None else where.type == "cuda"
        if was_on_gpu != to_gpu and not (to_gpu and non_blocking and self._is_pinned(x)):
            self._wait("to")
        with torch._C.DisableTorchFunctionSubclass():
            plain = _plain(x)
            result = self._originals["to"](
                plain, dtype or plain.dtype, copy=kwargs.get("copy", was_on_gpu != to_gpu)
            )
            return _on_gpu(result) if to_gpu else result

    def _factory(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            pinned = kwargs.pop("pin_memory", False)
            to_gpu = _is_cuda(kwargs.get("device"))
            if to_gpu:
                kwargs["device"] = "cpu"
            result = make(*args, **kwargs)
            if pinned:
                return self._keep_pinned(result)
            return _on_gpu(result) if to_gpu else result

        return made

    def _patch_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def checked(executor: Any, *args: Any, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                for x in (*args, *kwargs.values()):
                    if isinstance(x, torch.Tensor) and not isinstance(x, GpuTensor):
                        raise ValueError(
                            "Pointer argument cannot be accessed from Triton (cpu tensor?)"
                        )
                launch(executor, *_plain(args), **_plain(kwargs))

        monkeypatch.setattr(GridExecutor, "__call__", checked)


def _has_mask(index: Any) -> bool:
    """Return whether an index is a mask: the host needs its number of ones."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in parts)
