"""Which table of operations a device gets."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from octavo.errors import ConfigError
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


def require_triton(device: torch.device) -> None:
    """Checks that Triton kernels can run.

    Raises:
        ConfigError: if the package is missing, or the device is a CPU and the interpreter is off.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "attention_backend=triton needs the package triton, which is not installed: "
            "pip install triton."
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "attention_backend=triton needs a CUDA device. On a CPU use attention_backend=cpu; "
            "for tests TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, very slowly."
        )
