"""Triton in tests: through its interpreter, if the package is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:  # conftest.py imports this module before any test may import torch
    from octavo.kernels.base import Ops

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the package triton is not installed")


def triton_ops() -> list[Ops]:
    """Return the Triton table of operations, if it is available."""
    if not HAS_TRITON:
        return []
    from octavo.kernels.triton.ops import TritonOps
    from tests.torch_ops import Named

    return [cast("Ops", Named(TritonOps(upcast=True)))]


def prepare_interpreter() -> None:
    """Make the interpreter faster, and its products independent of the place in a tile."""
    if HAS_TRITON:
        _wrap_language_once()
        _multiply_step_by_step()


def _wrap_language_once() -> None:
    """Make the interpreter faster by a third.

    It wraps the language each time that a kernel, or a function in one, is called. Here the
    language stays wrapped: nothing else in this process uses it.
    """
    from triton.runtime import interpreter

    wrap = interpreter._patch_lang

    @functools.cache
    def wrap_once(function: Callable[..., object]) -> SimpleNamespace:
        wrap(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = wrap_once


def _multiply_step_by_step() -> None:
    """Make `tl.dot` a sum of outer products, from the first step along K to the last.

    A GPU adds every number of a tile in one order. The interpreter calls numpy, and OpenBLAS's
    kernels for AVX2 add in an order that depends on the shape of the tile and the place in it.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any
    ) -> TensorHandle:
        total = d.data.copy()
        left, right = (x.data.astype(total.dtype, copy=False) for x in (a, b))
        for step in range(left.shape[-1]):
            total += np.multiply(left[:, step, None], right[None, step])
        return TensorHandle(total, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
