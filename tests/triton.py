"""Triton in tests: through its interpreter, if the package is installed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
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
        _describe_types_once()
        _skip_unused_checks()
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


def _describe_types_once() -> None:
    """Make the interpreter faster by half: results of one shape share the objects that describe it.

    The interpreter makes these objects, which nothing changes, for each result. Operands that share
    them need no broadcast.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    find_dtype, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    init_block, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def find_dtype_once(type: tl.dtype) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(type)
        return dtypes[name]

    def init_block_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = element_ty.name, *sizes
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor_once(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in tensors:
            init_tensor(self, handle, type)
            tensors[shape] = {name: vars(self)[name] for name in ("shape", "numel")}
        vars(self).update(tensors[shape], handle=handle, type=type, dtype=type.scalar)

    def broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = find_dtype_once
    tl.block_type.__init__ = init_block_once
    tl.tensor.__init__ = init_tensor_once
    TritonSemantic.broadcast_impl_value = broadcast_others


def _skip_unused_checks() -> None:
    """Make the interpreter faster by a third: leave out work that has no result.

    It computes whether each sum of integers fits its type, and drops that unless Triton's debug
    mode is on. It converts operands to a common type even if they already have it.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    check_types = TritonSemantic.binary_op_type_checking_impl
    numbers = {"int32": (int,), "int64": (int,), "fp32": (int, float)}

    def check_other_types(self: TritonSemantic, lhs: Any, rhs: Any, *args: Any, **more: Any) -> Any:
        if type(lhs) is tl.tensor and lhs.dtype.name in numbers:
            if type(rhs) is tl.tensor and rhs.dtype.name == lhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
            if type(rhs) in numbers[lhs.dtype.name] and abs(rhs) < 2**31:
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return check_types(self, lhs, rhs, *args, **more)

    def call_directly(
        holder: object, name: str, function: Callable[..., Any], builder: object, scope: Any
    ) -> None:
        inner = inspect.unwrap(function)

        def call(*args: Any, **more: Any) -> Any:
            more["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **more)

        scope.set_attr(holder, name, call)

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    TritonSemantic.binary_op_type_checking_impl = check_other_types
    interpreter._patch_attr = call_directly


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
