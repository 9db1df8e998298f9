"""Parts of all native operations: codes of the kernels, checks of arguments, memory for results."""

from __future__ import annotations

import threading
from typing import Any, get_args

from numpy.typing import NDArray

from octavo.kernels.memory import Arena
from octavo.kernels.routing import Gate
from octavo.kernels.weights import QuantFormat
from octavo.system.tensor import HostTensor, Tensor, empty

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Codes of DType in csrc/args.h."""

QUANT_FORMATS = {name: code for code, name in enumerate(get_args(QuantFormat))}
"""Codes of QuantFormat in csrc/weight_args.h."""

GATES: dict[Gate | None, int] = {
    None: -1,
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "sigmoid": 3,
    "relu2": 4,
    "swigluoai": 5,
    "softplus": 6,
}
"""Codes of Gated in csrc/args.h."""


def check_rows(x: Tensor) -> None:
    """Assert that a tensor has dense rows."""
    assert x.dim() == 2
    assert x.stride(1) == 1 or x.shape[1] == 1, "rows must be dense"


def check_logits(x: Tensor) -> tuple[int, ...]:
    """Assert that x has float32 rows, and return its shape."""
    check_rows(x)
    assert x.dtype == "float32"
    return x.shape


class _Recording(threading.local):
    arena: Arena | None = None
    """Memory of the results; None: new memory."""
    records: bool = False
    """True while a plan records."""


class NativeMemory:
    """Memory for the results of operations: new, or from an arena."""

    def __init__(self) -> None:
        self._recording = _Recording()

    def to_host(self, x: Tensor) -> NDArray[Any]:
        """Return the same memory."""
        assert isinstance(x, HostTensor)
        array: NDArray[Any] = x.numpy()
        return array

    def _empty(self, *shape: int, dtype: str) -> Tensor:
        arena = self._recording.arena
        return empty(*shape, dtype=dtype) if arena is None else arena.empty(*shape, dtype=dtype)

    def _result(self, out: Tensor | None, *shape: int, dtype: str) -> Tensor:
        """Return `out` if that is given, or else new memory."""
        if out is None:
            return self._empty(*shape, dtype=dtype)
        check_rows(out)
        assert out.shape == shape
        assert out.dtype == dtype
        return out
