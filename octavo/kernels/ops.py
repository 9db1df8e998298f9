"""Which table of operations a device gets."""

from __future__ import annotations

from functools import cache

import torch

from octavo.kernels.base import Ops


@cache
def get_ops(device: torch.device) -> Ops:
    """The operations for tensors on a device: native on the CPU, plain torch elsewhere."""
    if device.type == "cpu":
        from octavo.kernels.native import NativeOps

        return NativeOps()
    from octavo.kernels.reference import ReferenceOps

    return ReferenceOps()
