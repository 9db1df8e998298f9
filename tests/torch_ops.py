"""Operations and attention as the tests call them: with torch's tensors and types."""

from __future__ import annotations

from typing import Any, cast

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.cpu import CPUAttention
from octavo.kernels.base import Ops
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_tensors import WithTorch, dtype_name, from_torch

_FROM_HOST = {"pack_weight", "quantize_weight"}
"""Operations that convert weights of the host."""


class Named:
    """Operations in torch, which accept torch's types in place of their names.

    Args:
        inner: `ReferenceOps`, or a table derived from it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found
        host = name in _FROM_HOST

        def call(*args: Any, **kwargs: Any) -> Any:
            given = {key: _named(arg, host) for key, arg in kwargs.items()}
            return found(*(_named(arg, host) for arg in args), **given)

        return call


def _named(x: Any, host: bool) -> Any:
    if isinstance(x, torch.dtype):
        return dtype_name(x)
    if host and isinstance(x, torch.Tensor):
        return from_torch(x)
    if host and isinstance(x, list | tuple):
        return [_named(part, host) for part in x]
    return x


def native_ops() -> Ops:
    return cast(Ops, WithTorch(NativeOps()))


def reference_ops() -> Ops:
    return cast(Ops, Named(ReferenceOps()))


def cpu_attention() -> AttentionBackend:
    return cast(AttentionBackend, WithTorch(CPUAttention()))


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """Multiply stretches of 32 inputs of x [rows, K] by random factors, so that some are outliers.

    See `to_two_terms` in `octavo/kernels/reference.py`.
    """
    rows, k = x.shape
    generator = torch.Generator().manual_seed(rows)
    factors = torch.randn(rows, -(-k // 32), generator=generator).exp()
    return (x * factors.repeat_interleave(32, 1)[:, :k]).to(x.dtype)
