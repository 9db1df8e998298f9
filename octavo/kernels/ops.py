"""Which table of operations a device gets."""

from __future__ import annotations

from functools import cache

import torch

from octavo.device import require_triton
from octavo.kernels.base import Ops


@cache
def get_ops(
    device: torch.device, attention_backend: str = "auto", *, batch_invariant: bool = False
) -> Ops:
    """The operations for tensors on a device: native on a CPU, Triton's on CUDA.

    Args:
        device: where the tensors are.
        attention_backend: with triton a CPU gets the Triton kernels as well, interpreted.
        batch_invariant: on CUDA, see `TritonOps`; the native operations always are.

    Raises:
        ConfigError: if Triton is needed and not there.
    """
    if device.type == "cpu" and attention_backend != "triton":
        from octavo.kernels.native import NativeOps

        return NativeOps()
    require_triton(device)
    from octavo.kernels.triton.ops import TritonOps

    return TritonOps(batch_invariant=batch_invariant, upcast=device.type == "cpu")
