"""Triton in tests: through its interpreter, where the package is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

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


def _wrap_language_once() -> None:
    """Makes the interpreter faster by a third.

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


if HAS_TRITON:
    _wrap_language_once()
