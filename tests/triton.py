"""Triton in tests: through its interpreter, where the package is installed."""

from __future__ import annotations

import importlib.util

import pytest

from octavo.kernels.base import Ops

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the package triton is not installed")


def triton_ops() -> list[Ops]:
    """The Triton table of operations, if there is one."""
    if not HAS_TRITON:
        return []
    from octavo.kernels.triton.ops import TritonOps

    return [TritonOps(upcast=True)]
