"""Operations by the C++ kernels in csrc/: batch-invariant, for the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo._native import kernels
from octavo.kernels.base import (
    SAMPLING_ROW,
    Arrived,
    Codes,
    ConvActivation,
    Gelu,
    HostCopy,
    LongArray,
    OnlineFormat,
    Ops,
    PackedWeight,
    QuantFormat,
    QuantizedWeight,
    StackedWeight,
    StateRates,
    StateSlots,
    Wkv7Inputs,
    Wkv7Parameters,
)
from octavo.kernels.memory import Arena
from octavo.kernels.routing import ExpertActivation, Gate, Routing, Score
from octavo.kernels.sizes import MAX_TAPS, order_nbytes, packed_nbytes, quantized_nbytes
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.tensor import HostTensor, Tensor, empty, from_numpy

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Codes of DType in csrc/kernels.h."""

_QUANT_FORMATS = {name: code for code, name in enumerate(get_args(QuantFormat))}
"""Codes of QuantFormat in csrc/kernels.h."""

# Gated and Unary in csrc/kernels.h
_GATES: dict[Gate | None, int] = {
    None: -1,
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "sigmoid": 3,
    "relu2": 4,
    "swigluoai": 5,
}
_SCORES: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "none": 3}
_EXP, _LOG, _TANH, _ERF, _GELU, _SOFT_CAP = 0, 1, 2, 3, {"none": 4, "tanh": 5}, 6
_RELU, _SCALE, _CLAMP, _RELU2, _SIGMOID = 7, 8, 9, 10, 11
_FIRST = "first_value", "value_rate"

# Largest k for which a heap is the fastest way to find the largest.
_FEW, _LOW_WORD = 64, 0xFFFFFFFF

available_isas = _native.available_isas
"""Return the instruction sets of this processor that have kernels, best first."""

isa = _native.isa
"""Return the instruction set in use."""

set_num_threads = _native.set_num_threads
"""Set the number of threads of a kernel, including the caller; 0, the default: all cores."""


def set_isa(name: str) -> None:
    """Select an instruction set. Weights packed before may no longer fit.

    Raises:
        ValueError: this processor does not support the instruction set.
    """
    _native.set_isa(name)


def _rows(x: Tensor) -> None:
    assert x.dim() == 2
    assert x.stride(1) == 1 or x.shape[1] == 1, "rows must be dense"


def _logits(x: Tensor) -> tuple[int, ...]:
    """Assert that x has float32 rows, and return its shape."""
    _rows(x)
    assert x.dtype == "float32"
    return x.shape


def _slot_addresses(slots: StateSlots, tokens: int) -> dict[str, int]:
    """Return the arguments of kernels that read and write states in slots."""
    requests = len(slots.sources)
    for array, size in (
        (slots.query_start_loc, requests + 1),
        (slots.sources, requests),
        (slots.slots, tokens),
        (slots.snapshots, tokens),
    ):
        assert array.dtype == "int32"
        assert array.shape == (size,)
        assert array.is_contiguous()
    return {
        "query_start_loc": slots.query_start_loc.data_ptr(),
        "sources": slots.sources.data_ptr(),
        "slots": slots.slots.data_ptr(),
        "snapshots": slots.snapshots.data_ptr(),
        "num_reqs": requests,
    }


class _Recording(threading.local):
    arena: Arena | None = None


def _new_quantized(
    n: int,
    k: int,
    format: QuantFormat,
    group_size: int,
    out: Tensor | None = None,
    *,
    ordered: bool = False,
) -> QuantizedWeight:
    if format in BLOCK_TYPES:
        assert k % BLOCK_TYPES[format].numbers == 0
    elif format == "fp8":
        assert group_size in (0, 32, 64, 128)
    else:
        assert group_size == 0 if format == "int8" else group_size in (32, 64, 128)
        assert 0 < k <= 2**17, "sums of 32 bits hold no more products"
    nbytes = quantized_nbytes(n, k, format, group_size, ordered=ordered)
    data = empty(nbytes, dtype="uint8") if out is None else out
    assert data.nbytes == nbytes
    assert data.data_ptr() % 64 == 0
    order = order_of(data, k) if ordered else None
    return QuantizedWeight(data, n, k, format, group_size, _native.panel(), order)


def order_of(data: Tensor, k: int) -> Tensor:
    """Return the order of inputs in a packed weight that has one: int32 [k]."""
    order: Tensor = data[data.nbytes - order_nbytes(k) :].view("int32")[:k]
    return order


class NativeOps:
    """Implementation of `Ops` by the native kernels; see `Ops` for shapes and meaning.

    The bits of a row's result depend neither on the other rows of the call nor on the number of
    threads. Elementwise operations compute in float32 and round once.
    """

    name = "native"
    packs_weights = True

    def __init__(self) -> None:
        self._recording = _Recording()

    @contextmanager
    def record(self, plan: _native.Plan, arena: Arena) -> Iterator[None]:
        """Record this thread's operations in `plan` instead of running them.

        Results are allocated in `arena`. The tensors and arrays of the recorded calls must outlive
        the plan. When the plan runs, its arguments set their number of rows.

        Raises:
            RuntimeError: an operation cannot be recorded: packing of weights, reading of a tensor's
                numbers, or another recording.
        """
        plan.begin()
        self._recording.arena = arena
        try:
            yield
        finally:
            plan.end()
            self._recording.arena = None

    def to_device(self, x: HostTensor | NDArray[Any]) -> HostTensor:
        """Return the same memory."""
        return x if isinstance(x, HostTensor) else from_numpy(x)

    def to_host(self, x: Tensor) -> NDArray[Any]:
        """Return the same memory."""
        assert isinstance(x, HostTensor)
        array: NDArray[Any] = x.numpy()
        return array

    def copy_to_host(self, x: Tensor) -> HostCopy:
        return Arrived(self.to_host(x))

    def copy_(self, out: Tensor, x: Tensor) -> None:
        assert out.shape == x.shape
        with np.errstate(all="ignore"):  # numbers beyond the type of `out` become infinite
            self.to_host(out)[...] = self.to_host(x)

    def copy_blocks(
        self, caches: Sequence[Tensor], src_dst_pairs: Sequence[tuple[int, int]]
    ) -> None:
        src, dst = np.array(src_dst_pairs, np.int64).reshape(-1, 2).T
        for cache in caches:
            blocks = self.to_host(cache)
            blocks[dst] = blocks[src]

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Allocate from the arena while a plan records."""
        return self._empty(*shape, dtype=like.dtype)

    def call(self, function: Callable[[int, int], object], tokens: int, requests: int) -> None:
        """See `Ops`."""
        if self._recording.arena is None:
            function(tokens, requests)
        else:
            _native.record_call(function)

    def _empty(self, *shape: int, dtype: str) -> Tensor:
        arena = self._recording.arena
        return empty(*shape, dtype=dtype) if arena is None else arena.empty(*shape, dtype=dtype)

    def _result(self, out: Tensor | None, *shape: int, dtype: str) -> Tensor:
        """Return `out` if that is given, or else new memory."""
        if out is None:
            return self._empty(*shape, dtype=dtype)
        _rows(out)
        assert out.shape == shape
        assert out.dtype == dtype
        return out

    def pack_weight(
        self,
        weight: HostTensor | Sequence[HostTensor],
        dtype: str | None = None,
        out: Tensor | None = None,
    ) -> PackedWeight:
        """Pack into panels of columns, see csrc/gemm.h; allocates only the result."""
        parts = [weight] if isinstance(weight, HostTensor) else list(weight)
        dtype, k = dtype or parts[0].dtype, parts[0].shape[1]
        n = sum(part.shape[0] for part in parts)
        nbytes = packed_nbytes(n, k, dtype)
        data = empty(nbytes, dtype="uint8") if out is None else out
        assert data.nbytes == nbytes
        assert data.data_ptr() % 64 == 0
        row = 0
        for part in parts:
            _rows(part)
            assert part.shape[1] == k
            kernels.pack_weight(
                src=part.data_ptr(),
                src_stride=part.stride(0),
                dst=data.data_ptr(),
                row0=row,
                rows=part.shape[0],
                n=n,
                k=k,
                src_dtype=DTYPE_CODES[part.dtype],
                dtype=DTYPE_CODES[dtype],
            )
            row += part.shape[0]
        return PackedWeight(data, n, k, dtype, _native.panel())

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Accumulate along K in the same order for every T."""
        return self._linear(x, weight, bias, out_dtype or x.dtype, out=out)

    def _linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        out_dtype: str,
        gate: Gate | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        _rows(x)
        assert x.shape[1] == weight.k
        assert weight.panel == _native.panel(), "weight was packed for another instruction set"
        if bias is not None:
            assert bias.shape == (weight.n,)
            assert bias.dtype == x.dtype
            assert bias.is_contiguous()
        width = weight.n if gate is None else weight.n // 2
        out = self._result(out, x.shape[0], width, dtype=out_dtype)
        kernel = kernels.linear
        encoding: dict[str, int] = {}
        if isinstance(weight, QuantizedWeight):
            kernel = kernels.linear_q
            encoding = {
                "group": weight.group_size,
                "format": _QUANT_FORMATS[weight.format],
                "order": 0 if weight.order is None else weight.order.data_ptr(),
            }
        else:
            assert x.dtype == weight.dtype
        kernel(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            m=x.shape[0],
            n=weight.n,
            k=weight.k,
            first_panel=0,
            num_panels=0,
            gated=_GATES[gate],
            limit=0.0,
            dtype=DTYPE_CODES[x.dtype],
            out_dtype=DTYPE_CODES[out_dtype],
            **encoding,
        )
        return out

    def head_linear(
        self, x: Tensor, weight: PackedWeight, num_heads: int, out: Tensor | None = None
    ) -> Tensor:
        """Accumulate along K in the order of `linear`."""
        tokens, heads, k = x.shape
        n = weight.n // num_heads
        if out is None:
            out = self._empty(tokens, heads, n, dtype=x.dtype)
        assert (heads, k, weight.n) == (num_heads, weight.k, heads * n)
        assert out.shape == (tokens, heads, n)
        assert x.dtype == out.dtype == weight.dtype
        assert x.stride(2) == out.stride(2) == 1
        assert weight.panel == _native.panel(), "weight was packed for another instruction set"
        kernels.head_linear(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            weight=weight.data.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            rows=tokens,
            heads=heads,
            n=n,
            k=k,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def quantize_weight(
        self,
        weight: Sequence[HostTensor],
        format: OnlineFormat,
        group_size: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Compute the same codes and scales on every instruction set.

        Allocates the result and one panel.
        """
        n, k = sum(part.shape[0] for part in weight), weight[0].shape[1]
        packed = _new_quantized(n, k, format, group_size, out)
        row = 0
        for part in weight:
            _rows(part)
            assert part.shape[1] == k
            kernels.quantize_weight(
                src=part.data_ptr(),
                src_stride=part.stride(0),
                dst=packed.data.data_ptr(),
                row0=row,
                rows=part.shape[0],
                n=n,
                k=k,
                group=group_size,
                format=_QUANT_FORMATS[format],
                dtype=DTYPE_CODES[part.dtype],
            )
            row += part.shape[0]
        return packed

    def pack_quantized(
        self,
        n: int,
        k: int,
        format: QuantFormat,
        group_size: int,
        parts: Iterable[Codes],
        out: Tensor | None = None,
        order: NDArray[np.int32] | None = None,
    ) -> QuantizedWeight:
        """Pack into panels of columns, see csrc/quant.h and csrc/fp8.h."""
        packed = _new_quantized(n, k, format, group_size, out, ordered=order is not None)
        if order is not None:
            assert packed.order is not None
            self.copy_(packed.order, from_numpy(order))
        groups = -(-k // (group_size or k))
        row = 0
        for part in parts:
            rows = part.codes.shape[0]
            assert (part.zeros is not None) == (format in ("int4_zeros", "int8_groups"))
            for tensor, shape, dtype in (
                (part.codes, (rows, k), "uint8"),
                (part.scales, (rows, groups), "float32"),
                (part.zeros, (rows, groups), "uint8"),
            ):
                assert tensor is None or tensor.shape == shape
                assert tensor is None or tensor.dtype == dtype
                assert tensor is None or tensor.is_contiguous()
            kernels.pack_quant(
                codes=part.codes.data_ptr(),
                scales=part.scales.data_ptr(),
                zeros=0 if part.zeros is None else part.zeros.data_ptr(),
                dst=packed.data.data_ptr(),
                row0=row,
                rows=rows,
                n=n,
                k=k,
                group=group_size,
                format=_QUANT_FORMATS[format],
            )
            row += rows
        assert row == n
        return packed

    def pack_blocks(
        self,
        blocks: Sequence[HostTensor],
        block_type: QuantFormat,
        k: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Pack into panels of columns, see csrc/blocks.h."""
        n, size = sum(part.shape[0] for part in blocks), BLOCK_TYPES[block_type]
        packed = _new_quantized(n, k, block_type, 0, out)
        row = 0
        for part in blocks:
            assert part.shape[1] == k // size.numbers * size.nbytes
            assert part.dtype == "uint8"
            assert part.stride(1) == 1
            kernels.pack_blocks(
                src=part.data_ptr(),
                src_stride=part.stride(0),
                dst=packed.data.data_ptr(),
                row0=row,
                rows=part.shape[0],
                n=n,
                k=k,
                format=_QUANT_FORMATS[block_type],
            )
            row += part.shape[0]
        return packed

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = self._empty(*x.shape, dtype=x.dtype)
        dim = x.shape[-1]
        assert x.dim() in (2, 3)
        assert x.stride(-1) == 1
        assert out.stride(-1) == 1
        assert weight.shape == (dim,)
        assert x.dtype == weight.dtype == out.dtype
        assert out.shape == x.shape
        assert weight.is_contiguous()
        heads = x.shape[1] if x.dim() == 3 else 1
        kernels.rms_norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            residual=0,
            residual_out=0,
            residual_stride=0,
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            rows=x.shape[0],
            heads=heads,
            dim=dim,
            eps=eps,
            weight_offset=weight_offset,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        _rows(x)
        _rows(residual)
        rows, dim = x.shape
        assert residual.shape == x.shape
        assert weight.is_contiguous()
        assert weight.shape == (dim,)
        assert x.dtype == weight.dtype == residual.dtype
        normed, total = out or (None, None)
        normed = self._result(normed, rows, dim, dtype=x.dtype)
        total = self._result(total, rows, dim, dtype=x.dtype)
        assert rows < 2 or total.stride(0) == residual.stride(0)
        kernels.rms_norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=0,
            residual=residual.data_ptr(),
            residual_out=total.data_ptr(),
            residual_stride=residual.stride(0),
            weight=weight.data_ptr(),
            out=normed.data_ptr(),
            out_stride=normed.stride(0),
            out_head_stride=0,
            rows=rows,
            heads=1,
            dim=dim,
            eps=eps,
            weight_offset=weight_offset,
            dtype=DTYPE_CODES[x.dtype],
        )
        return normed, total

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        _rows(x)
        rows, dim = x.shape
        assert weight.shape == (dim,)
        assert weight.is_contiguous()
        assert x.dtype == weight.dtype
        if bias is not None:
            assert bias.shape == (dim,)
            assert bias.is_contiguous()
            assert x.dtype == bias.dtype
        out = self._result(out, rows, dim, dtype=x.dtype)
        kernels.layer_norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=rows,
            dim=dim,
            eps=eps,
            weight_offset=weight_offset,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def _unary(self, kind: int, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = self._result(out, *x.shape, dtype=x.dtype)
        self._unary_into(out, kind, x, 0.0)
        return out

    def _unary_into(self, out: Tensor, kind: int, x: Tensor, param: float) -> None:
        assert x.is_contiguous()
        rows = x.shape[0]
        dim = x.numel() // max(rows, 1)
        kernels.unary(
            kind=kind,
            x=x.data_ptr(),
            out=out.data_ptr(),
            out_stride=dim if out.is_contiguous() else out.stride(0),
            rows=rows,
            dim=dim,
            param=param,
            dtype=DTYPE_CODES[x.dtype],
        )

    def rms(self, x: Tensor, least: float = 0.0, *, inverse: bool = False) -> Tensor:
        _rows(x)
        rows, dim = x.shape
        out = self._empty(rows, 1, dtype=x.dtype)
        kernels.rms(
            x=x.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            rows=rows,
            dim=dim,
            least=least,
            inverse=inverse,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def cutoff(self, x: Tensor, multiplier: float) -> Tensor:
        _rows(x)
        rows, dim = x.shape
        out = self._empty(rows, dim, dtype=x.dtype)
        kernels.cutoff(
            x=x.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            rows=rows,
            dim=dim,
            multiplier=multiplier,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def act_and_mul(self, gate_up: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Round act(gate) to the dtype before the product, as Hugging Face does."""
        _rows(gate_up)
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.shape[1] == 2 * dim
        out = self._result(out, rows, dim, dtype=gate_up.dtype)
        kernels.gated(
            kind=_GATES[activation],
            limit=0.0,
            x=gate_up.data_ptr(),
            x_stride=gate_up.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=rows,
            dim=dim,
            dtype=DTYPE_CODES[gate_up.dtype],
        )
        return out

    def linear_act_and_mul(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Gate,
        out: Tensor | None = None,
    ) -> Tensor:
        """Use one kernel if gate and up are whole panels, so that both stay in the cache."""
        if weight.n % (2 * weight.panel) == 0:
            return self._linear(x, weight, bias, x.dtype, activation, out)
        return self.act_and_mul(self._linear(x, weight, bias, x.dtype), activation, out)

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        return self._unary(_GELU[approximate], x, out)

    def relu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._unary(_RELU, x, out)

    def sigmoid(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._unary(_SIGMOID, x, out)

    def xielu(self, x: Tensor, alphas: Tensor, out: Tensor | None = None) -> Tensor:
        assert x.is_contiguous()
        assert alphas.shape == (2,)
        assert x.dtype == alphas.dtype
        out = self._result(out, *x.shape, dtype=x.dtype)
        kernels.xielu(
            x=x.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=x.shape[0],
            dim=x.shape[1],
            alphas=alphas.data_ptr(),
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def add(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        _rows(x)
        _rows(y)
        rows, dim = x.shape
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        out = self._result(out, rows, dim, dtype=x.dtype)
        kernels.add(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=rows,
            dim=dim,
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def multiply(
        self,
        x: Tensor,
        factor: Tensor,
        activation: Gate | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = self._empty(*x.shape, dtype=x.dtype)
        dim = x.shape[-1]
        assert x.dim() in (2, 3)
        assert out.shape == x.shape
        assert x.stride(-1) == out.stride(-1) == factor.stride(-1) == 1
        assert x.dtype == factor.dtype == out.dtype
        assert factor.shape in (x.shape, (dim,), (x.shape[0], 1), (1,))
        kernels.multiply(
            x=x.data_ptr(),
            factor=factor.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            factor_stride=factor.stride(0) if factor.dim() > 1 else 0,
            factor_head_stride=factor.stride(1) if factor.dim() == 3 else 0,
            factor_step=int(factor.shape[-1] == dim),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            rows=x.shape[0],
            heads=x.shape[1] if x.dim() == 3 else 1,
            dim=dim,
            kind=_GATES[activation],
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def sum_parts(
        self,
        x: Tensor,
        parts: int,
        bias: Tensor | None,
        out_dtype: str,
        out: Tensor | None = None,
    ) -> Tensor:
        _rows(x)
        assert x.dtype == "float32"
        rows, dim = x.shape[0], x.shape[1] // parts
        assert bias is None or (bias.dtype == out_dtype and bias.shape == (dim,))
        out = self._result(out, rows, dim, dtype=out_dtype)
        kernels.sum_parts(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=rows,
            parts=parts,
            dim=dim,
            dtype=DTYPE_CODES[out_dtype],
        )
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        out = self._empty(*x.shape, dtype=x.dtype)
        self._unary_into(out, _SCALE, x, factor)
        return out

    def scale_(self, x: Tensor, factor: float) -> None:
        self._unary_into(x, _SCALE, x, factor)

    def clamp_(self, x: Tensor, bound: float) -> None:
        self._unary_into(x, _CLAMP, x, bound)

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        self._unary_into(x, _SOFT_CAP, x, cap)

    def exp(self, x: Tensor) -> Tensor:
        """Compute within 2 ulp in float32."""
        return self._unary(_EXP, x)

    def log(self, x: Tensor) -> Tensor:
        """Compute within 2 ulp in float32."""
        return self._unary(_LOG, x)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        tokens, rotary_dim = positions.shape[0], cos_sin_cache.shape[1]
        assert query.dim() == key.dim() == 3
        assert query.shape[0] == key.shape[0] == tokens
        assert query.stride(2) == key.stride(2) == 1
        assert query.dtype == key.dtype
        assert rotary_dim % 2 == 0
        assert rotary_dim <= min(query.shape[2], key.shape[2])
        assert positions.dtype == "int64"
        assert positions.is_contiguous()
        assert cos_sin_cache.dtype == "float32"
        assert cos_sin_cache.is_contiguous()
        kernels.rotary(
            positions=positions.data_ptr(),
            query=query.data_ptr(),
            query_stride=query.stride(0),
            query_head_stride=query.stride(1),
            query_heads=query.shape[1],
            key=key.data_ptr(),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            key_heads=key.shape[1],
            cos_sin=cos_sin_cache.data_ptr(),
            tokens=tokens,
            rotary_dim=rotary_dim,
            is_neox=is_neox,
            dtype=DTYPE_CODES[query.dtype],
        )

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        slots: StateSlots,
        activation: ConvActivation,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; a request's tiles of channels run in parallel."""
        _rows(x)
        _rows(state)
        (tokens, channels), taps = x.shape, weight.shape[1]
        out = self._result(out, tokens, channels, dtype=x.dtype)
        assert 2 <= taps <= MAX_TAPS
        assert weight.shape == (channels, taps)
        assert weight.is_contiguous()
        assert x.dtype == weight.dtype
        assert bias is None or (bias.shape == (channels,) and bias.dtype == x.dtype)
        assert state.shape[1] == (taps - 1) * channels
        assert state.dtype == "float32"
        kernels.causal_conv(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            taps=taps,
            silu=activation == "silu",
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        slots: StateSlots,
        beta_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; heads and, if these are few, their columns run in parallel."""
        tokens, heads, value_size = value.shape
        key_heads, key_size = query.shape[1:]
        by_channel = decay.shape[1] != heads
        if out is None:
            out = self._empty(tokens, heads, value_size, dtype=value.dtype)
        _rows(decay)
        _rows(beta)
        _rows(state)
        assert heads % key_heads == 0
        assert query.shape == key.shape == (tokens, key_heads, key_size)
        assert out.shape == value.shape
        for x in (query, key, value, out):
            assert x.dtype == decay.dtype == beta.dtype
            assert x.stride(2) == 1 or x.shape[2] == 1
            assert x.stride(1) == x.shape[2] or x.shape[1] == 1, "heads must be dense"
        assert decay.shape == (tokens, heads * (key_size if by_channel else 1))
        assert beta.shape == (tokens, heads)
        assert a_log.shape == (heads,)
        assert dt_bias.shape == decay.shape[1:]
        assert a_log.dtype == dt_bias.dtype == state.dtype == "float32"
        assert a_log.is_contiguous()
        assert dt_bias.is_contiguous()
        assert state.shape[1] == heads * key_size * value_size
        kernels.gated_delta_rule(
            query=query.data_ptr(),
            query_stride=query.stride(0),
            key=key.data_ptr(),
            key_stride=key.stride(0),
            value=value.data_ptr(),
            value_stride=value.stride(0),
            decay=decay.data_ptr(),
            decay_stride=decay.stride(0),
            beta=beta.data_ptr(),
            beta_stride=beta.stride(0),
            a_log=a_log.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            key_heads=key_heads,
            heads=heads,
            key_size=key_size,
            value_size=value_size,
            beta_scale=beta_scale,
            by_channel=by_channel,
            dtype=DTYPE_CODES[value.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; a request's heads run in parallel."""
        (tokens, heads, size), (_, groups, rows) = x.shape, b.shape
        if out is None:
            out = self._empty(*x.shape, dtype=x.dtype)
        assert b.shape == c.shape
        assert heads % groups == 0
        assert dt.shape == (tokens, heads)
        assert out.shape == x.shape
        for tensor in (x, b, c, out):
            assert tensor.dtype == x.dtype
            assert tensor.stride(2) == 1 or tensor.shape[2] == 1
            assert tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1
        assert dt.dtype == x.dtype
        for parameter in (rates.a_log, rates.dt_bias, rates.skip):
            assert parameter.shape == (heads,)
            assert parameter.dtype == "float32"
            assert parameter.is_contiguous()
        _rows(dt)
        _rows(state)
        assert state.shape[1] == heads * rows * size
        assert state.dtype == "float32"
        kernels.ssd(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            out_stride=out.stride(0),
            a_log=rates.a_log.data_ptr(),
            dt_bias=rates.dt_bias.data_ptr(),
            skip=rates.skip.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            heads=heads,
            groups=groups,
            head_size=size,
            state_size=rows,
            dt_min=rates.dt_min,
            dt_max=rates.dt_max,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; a request's tiles of channels run in parallel."""
        (tokens, channels), rows = x.shape, b.shape[1]
        out = self._result(out, tokens, channels, dtype=x.dtype)
        assert dt.shape == gate.shape == x.shape
        assert b.shape == c.shape == (tokens, rows)
        for tensor in (x, dt, b, c, gate):
            _rows(tensor)
            assert tensor.dtype == x.dtype
        assert rates.a_log.shape == (rows, channels)
        assert rates.dt_bias.shape == rates.skip.shape == (channels,)
        for parameter in (rates.a_log, rates.dt_bias, rates.skip):
            assert parameter.dtype == "float32"
            assert parameter.is_contiguous()
        _rows(state)
        assert state.shape[1] == rows * channels
        assert state.dtype == "float32"
        kernels.selective_scan(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            gate=gate.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            gate_stride=gate.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            out_stride=out.stride(0),
            a_log=rates.a_log.data_ptr(),
            dt_bias=rates.dt_bias.data_ptr(),
            skip=rates.skip.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            state_size=rows,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def token_shift(self, x: Tensor, mix: Tensor, state: Tensor, slots: StateSlots) -> Tensor:
        """Compute token by token; a request's tiles of channels run in parallel."""
        _rows(x)
        _rows(state)
        (tokens, channels), mixes = x.shape, mix.shape[0]
        assert mix.shape == (mixes, channels)
        assert mix.dtype == state.dtype == "float32"
        assert mix.is_contiguous()
        assert state.shape[1] == channels
        out = self._empty(tokens, mixes, channels, dtype=x.dtype)
        kernels.token_shift(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            mix=mix.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            mixes=mixes,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def wkv7(
        self,
        inputs: Wkv7Inputs,
        parameters: Wkv7Parameters,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; a request's heads run in parallel."""
        tokens, heads, size = inputs.value.shape
        if out is None:
            out = self._empty(tokens, heads, size, dtype=inputs.value.dtype)
        names = ("receptance", "decay", "key", "value", "rate", "gate")
        rows = {name: getattr(inputs, name) for name in names} | {"out": out}
        if inputs.first is not None:
            rows |= zip(_FIRST, inputs.first, strict=True)
        for x in rows.values():
            assert x.shape == (tokens, heads, size)
            assert x.dtype == inputs.value.dtype
            assert x.stride(2) == 1
            assert x.stride(1) == size or heads == 1, "heads must be dense"
        vectors = {
            name: getattr(parameters, name)
            for name in ("removal", "key_rate", "bonus", "weight", "bias")
        }
        for vector in vectors.values():
            assert vector.shape == (heads * size,)
            assert vector.dtype == "float32"
            assert vector.is_contiguous()
        _rows(state)
        assert state.shape[1] == heads * size * size
        assert state.dtype == "float32"
        kernels.wkv7(
            **{name: x.data_ptr() for name, x in (rows | vectors).items()},
            **{f"{name}_stride": x.stride(0) for name, x in rows.items()},
            **{f"{name}{end}": 0 for end in ("", "_stride") for name in _FIRST if name not in rows},
            state=state.data_ptr(),
            state_stride=state.stride(0),
            heads=heads,
            size=size,
            eps=parameters.eps,
            dtype=DTYPE_CODES[inputs.value.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def _softmax(self, x: Tensor, log: bool) -> Tensor:
        rows, dim = _logits(x)
        out = self._empty(rows, dim, dtype=x.dtype)
        kernels.softmax(
            x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim, log=log
        )
        return out

    def stack(
        self,
        weights: Sequence[PackedWeight | QuantizedWeight | None],
        bias: Tensor | None = None,
    ) -> StackedWeight:
        addresses = [0 if weight is None else weight.data.data_ptr() for weight in weights]
        return StackedWeight(tuple(weights), bias, from_numpy(np.array(addresses, np.int64)))

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = _logits(logits)
        assert routing.top_k <= experts
        assert experts % routing.groups == 0
        for of_experts in (bias, factors):
            assert of_experts is None or of_experts.shape == (experts,)
            assert of_experts is None or of_experts.dtype == "float32"
        ids = self._empty(tokens, routing.top_k, dtype="int32")
        weights = self._empty(tokens, routing.top_k, dtype="float32")
        kernels.route(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            factors=0 if factors is None else factors.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            tokens=tokens,
            experts=experts,
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            score=_SCORES[routing.score],
            softmax_chosen=routing.softmax_chosen,
            renormalize=routing.renormalize,
            epsilon=routing.epsilon,
            least=routing.least,
            scale=routing.scale,
        )
        return ids, weights

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        up: StackedWeight | None,
        down: StackedWeight | None,
        activation: ExpertActivation,
        factors: Tensor | None = None,
        inner: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute all as one set of tasks, see csrc/experts.cpp."""
        _rows(x)
        (tokens, top_k), stacked = ids.shape, up or down
        assert stacked is not None
        assert ids.dtype == "int32"
        assert ids.is_contiguous()
        assert factors is None or (factors.shape == ids.shape and factors.is_contiguous())
        assert activation.gated or activation.name == "relu2"
        if up is not None:
            width = up.first.n // (2 if activation.gated else 1)
            inner = self._result(inner, tokens * top_k, width, dtype=x.dtype)
        assert inner is not None
        if down is not None:
            out = self._result(out, tokens * top_k, down.first.n, dtype=x.dtype)
        places = self._empty(tokens, top_k, dtype="int32")
        kernels.experts(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            ids=ids.data_ptr(),
            factors=0 if factors is None else factors.data_ptr(),
            places=places.data_ptr(),
            inner=inner.data_ptr(),
            inner_stride=inner.stride(0),
            out=0 if out is None else out.data_ptr(),
            out_stride=0 if out is None else out.stride(0),
            tokens=tokens,
            top_k=top_k,
            experts=len(stacked.weights),
            hidden=x.shape[1],
            up_outputs=0 if up is None else up.first.n,
            down_inputs=inner.shape[1],
            down_outputs=0 if down is None else down.first.n,
            gated=_GATES[activation.name if activation.gated else None],
            activation=_RELU2,
            limit=activation.limit,
            dtype=DTYPE_CODES[x.dtype],
            **self._stacked("up", up, x.shape[1], x.dtype),
            **self._stacked("down", down, inner.shape[1], x.dtype),
        )
        result = inner if down is None else out
        assert result is not None
        return result, places

    @staticmethod
    def _stacked(
        name: str, stacked: StackedWeight | None, inputs: int, dtype: str
    ) -> dict[str, int]:
        """Return the arguments of `kernels.experts` for one of the products."""
        data = bias = group = order = form = 0
        plain = True
        if stacked is not None:
            weight, data = stacked.first, stacked.addresses.data_ptr()
            assert weight.k == inputs
            assert weight.panel == _native.panel(), (
                "weights were packed for another instruction set"
            )
            if stacked.bias is not None:
                assert stacked.bias.shape == (len(stacked.weights), weight.n)
                assert stacked.bias.dtype == dtype
                assert stacked.bias.is_contiguous()
                bias = stacked.bias.data_ptr()
            if isinstance(weight, QuantizedWeight):
                plain, group, form = False, weight.group_size, _QUANT_FORMATS[weight.format]
                if weight.order is not None:
                    order = weight.order.data_ptr() - weight.data.data_ptr()
            else:
                assert weight.dtype == dtype
        values = {"": data, "_bias": bias, "_group": group, "_order": order, "_format": form}
        return {f"{name}{key}": value for key, value in values.items()} | {f"{name}_plain": plain}

    def sum_experts(
        self, x: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        _rows(x)
        tokens, top_k = places.shape
        assert x.shape[0] == tokens * top_k
        assert places.dtype == "int32"
        assert weights is None or weights.shape == places.shape
        out = self._result(out, tokens, x.shape[1], dtype=x.dtype)
        kernels.sum_experts(
            x=x.data_ptr(),
            places=places.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            tokens=tokens,
            top_k=top_k,
            dim=x.shape[1],
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        """Compute maximum, sum of exponentials and quotient, each in the order of the row."""
        return self._softmax(x, log=False)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Compute maximum, sum of exponentials and difference, each in the order of the row."""
        return self._softmax(x, log=True)

    def argmax(self, x: Tensor) -> Tensor:
        rows, dim = _logits(x)
        out = self._empty(rows, dtype="int64")
        kernels.argmax(x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim)
        return out

    def row_max(self, x: Tensor) -> Tensor:
        rows, dim = _logits(x)
        out = self._empty(rows, dtype=x.dtype)
        kernels.row_max(
            x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim
        )
        return out

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Sample without sorting the vocabulary; see csrc/sample.h."""
        rows, dim = _logits(x)
        assert params.dtype == SAMPLING_ROW
        assert params.shape == (rows,)
        assert params.flags.c_contiguous
        out = self._empty(rows, dtype="int64")
        kernels.sample(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            params=params.ctypes.data,
            out=out.data_ptr(),
            rows=rows,
            dim=dim,
        )
        return out

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Mask rows of x; ignore indices beyond x. In a plan, `rows` has the length of a step."""
        x_rows, dim = _logits(x)
        assert bitmask.shape == (len(rows), -(-dim // 32))
        assert bitmask.dtype == "int32"
        assert bitmask.stride(1) == 1 or bitmask.shape[1] == 1
        assert rows.dtype == "int64"
        assert rows.is_contiguous()
        kernels.apply_bitmask(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_rows=x_rows,
            bitmask=bitmask.data_ptr(),
            bitmask_stride=bitmask.stride(0),
            indices=rows.data_ptr(),
            rows=len(rows),
            dim=dim,
        )

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compute in one pass with a heap of size k, or by sorting."""
        rows, dim = _logits(x)
        assert 0 <= k <= dim
        if k > _FEW:
            return self._sort(x, k)
        values = self._empty(rows, k, dtype=x.dtype)
        indices = self._empty(rows, k, dtype="int64")
        kernels.top_k(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            values=values.data_ptr(),
            indices=indices.data_ptr(),
            rows=rows,
            dim=dim,
            k=k,
        )
        return values, indices

    def _sort(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Sort integers that consist of a number and its index.

        No two of them are equal, so every algorithm returns the same order.
        """
        numbers = self.to_host(x)
        dim = numbers.shape[1]
        numbers = np.where(np.isnan(numbers), np.float32(-np.inf), numbers)
        bits = (numbers + np.float32(0)).view(np.int32)  # -0.0 is equal to 0.0
        bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats sort backwards as integers
        keys = bits.astype(np.int64) << 32
        keys |= _LOW_WORD - np.arange(dim)
        if k < dim:
            keys.partition(dim - k, axis=-1)
            keys = keys[:, dim - k :]
        keys.sort(axis=-1)
        indices = _LOW_WORD - (keys[:, ::-1] & _LOW_WORD)
        values = np.take_along_axis(numbers, indices, 1)
        return from_numpy(values), from_numpy(indices)

    def gather(self, x: Tensor, ids: LongArray) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = np.take_along_axis(self.to_host(x), ids, 1)
        return numbers

    def ranks(self, x: Tensor, ids: LongArray) -> LongArray:
        numbers, ids = self.to_host(x), ids[:, None]
        value = np.take_along_axis(numbers, ids, 1)
        lower = np.arange(numbers.shape[1]) < ids
        ahead = (numbers > value) | ((numbers == value) & lower)
        ranks: LongArray = ahead.sum(-1) + 1
        return ranks

    def set_at_(self, x: Tensor, rows: LongArray, columns: LongArray | None, value: float) -> None:
        self.to_host(x)[rows if columns is None else (rows, columns)] = value

    def add_at_(
        self, x: Tensor, rows: LongArray, columns: LongArray, values: NDArray[np.float32]
    ) -> None:
        with np.errstate(all="ignore"):
            self.to_host(x)[rows, columns] += values

    def penalize_(
        self,
        x: Tensor,
        rows: LongArray,
        columns: LongArray,
        counts: NDArray[np.float32],
        penalties: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        repetition, frequency, presence = penalties
        logits = self.to_host(x)
        values = logits[rows, columns]
        with np.errstate(all="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
            values -= frequency * counts
            values -= presence * (counts > 0)
        logits[rows, columns] = values

    def change_rows(self, x: Tensor, rows: LongArray, change: Callable[[Ops, Any], object]) -> None:
        """Import torch, which plug-ins need."""
        from octavo.kernels.torch_tensors import change_with_torch

        numbers = self.to_host(x)
        own = numbers[rows]
        change_with_torch(self, own, change)
        numbers[rows] = own

    def embedding(
        self,
        weight: Tensor | PackedWeight | QuantizedWeight,
        ids: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        """Copy the rows, also from a packed weight. Ids outside of the table yield NaN."""
        assert ids.dtype == "int64"
        assert ids.is_contiguous()
        packed = isinstance(weight, PackedWeight)
        if isinstance(weight, PackedWeight | QuantizedWeight):
            assert weight.panel == _native.panel(), "weight was packed for another instruction set"
            table, n, dim, stride = weight.data, weight.n, weight.k, 0
        else:
            _rows(weight)
            table, (n, dim), stride = weight, weight.shape, weight.stride(0)
        if isinstance(weight, QuantizedWeight):
            assert weight.format in BLOCK_TYPES
            assert dtype is not None
            out = self._empty(len(ids), dim, dtype=dtype)
            kernels.gather_blocks(
                table=table.data_ptr(),
                n=n,
                ids=ids.data_ptr(),
                out=out.data_ptr(),
                rows=len(ids),
                dim=dim,
                format=_QUANT_FORMATS[weight.format],
                dtype=DTYPE_CODES[dtype],
            )
            return out
        out = self._empty(len(ids), dim, dtype=weight.dtype)
        kernels.gather(
            table=table.data_ptr(),
            table_stride=stride,
            n=n,
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            rows=len(ids),
            dim=dim,
            packed=packed,
            dtype=DTYPE_CODES[weight.dtype],
        )
        return out
