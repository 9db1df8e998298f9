"""Operations by the C++ kernels in csrc/: batch-invariant, for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo._native import kernels
from octavo.kernels.base import Activation, Arrived, Gelu, HostCopy, Ops
from octavo.kernels.memory import Arena
from octavo.kernels.native_base import DTYPE_CODES, GATES, QUANT_FORMATS, check_rows
from octavo.kernels.native_experts import NativeExpertOps
from octavo.kernels.native_logits import NativeLogitOps
from octavo.kernels.native_lora import NativeLoraOps
from octavo.kernels.native_states import NativeStateOps
from octavo.kernels.ops_logits import LongArray
from octavo.kernels.routing import Gate
from octavo.kernels.sizes import order_nbytes, packed_nbytes, quantized_nbytes
from octavo.kernels.weights import Codes, OnlineFormat, PackedWeight, QuantFormat, QuantizedWeight
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.tensor import HostTensor, Tensor, empty, from_numpy

_EXP, _LOG, _TANH, _ERF, _GELU, _SOFT_CAP = 0, 1, 2, 3, {"none": 4, "tanh": 5}, 6
_RELU, _SCALE, _CLAMP, _SIGMOID, _SILU = 7, 8, 9, 11, 12
_ACTIVATIONS: dict[Activation, int] = {
    "gelu": _GELU["none"],
    "gelu_tanh": _GELU["tanh"],
    "relu": _RELU,
    "silu": _SILU,
}


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


class NativeOps(NativeStateOps, NativeExpertOps, NativeLoraOps, NativeLogitOps):
    """Implementation of `Ops` by the native kernels; see `Ops` for shapes and meaning.

    The bits of a row's result depend neither on the other rows of the call nor on the number of
    threads. Elementwise operations compute in float32 and round once.
    """

    name = "native"
    packs_weights = True

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
        self._recording.records = True
        try:
            with self.allocate_in(arena):
                yield
        finally:
            plan.end()
            self._recording.records = False

    @contextmanager
    def allocate_in(self, arena: Arena) -> Iterator[None]:
        """Allocate the results of this thread's operations in `arena`."""
        assert self._recording.arena is None
        self._recording.arena = arena
        try:
            yield
        finally:
            self._recording.arena = None

    def to_device(self, x: HostTensor | NDArray[Any]) -> HostTensor:
        """Return the same memory."""
        return x if isinstance(x, HostTensor) else from_numpy(x)

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
        """Allocate from the arena, if there is one."""
        return self._empty(*shape, dtype=like.dtype)

    def call(self, function: Callable[[int, int], object], tokens: int, requests: int) -> None:
        """See `Ops`."""
        if not self._recording.records:
            function(tokens, requests)
        else:
            _native.record_call(function)

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
            check_rows(part)
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
        activation: Activation | None = None,
    ) -> Tensor:
        check_rows(x)
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
                "format": QUANT_FORMATS[weight.format],
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
            gated=GATES[gate],
            limit=0.0,
            activation=-1 if activation is None else _ACTIVATIONS[activation],
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
            check_rows(part)
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
                format=QUANT_FORMATS[format],
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
                format=QUANT_FORMATS[format],
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
                format=QUANT_FORMATS[block_type],
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
        check_rows(x)
        check_rows(residual)
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
        out = self._result(out, *x.shape, dtype=x.dtype)
        self._layer_norm(x, None, weight, bias, eps, weight_offset, out)
        return out

    def fused_add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_rows(residual)
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        normed, total = out or (None, None)
        normed = self._result(normed, *x.shape, dtype=x.dtype)
        total = self._result(total, *x.shape, dtype=x.dtype)
        assert x.shape[0] < 2 or total.stride(0) == residual.stride(0)
        self._layer_norm(x, (residual, total), weight, bias, eps, weight_offset, normed)
        return normed, total

    def _layer_norm(
        self,
        x: Tensor,
        sums: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float,
        out: Tensor,
    ) -> None:
        """Call the kernel; `sums` are a residual and the sum with it."""
        check_rows(x)
        rows, dim = x.shape
        assert weight.shape == (dim,)
        assert weight.is_contiguous()
        assert x.dtype == weight.dtype
        if bias is not None:
            assert bias.shape == (dim,)
            assert bias.is_contiguous()
            assert x.dtype == bias.dtype
        kernels.layer_norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=0 if sums is None else sums[0].data_ptr(),
            residual_out=0 if sums is None else sums[1].data_ptr(),
            residual_stride=0 if sums is None else sums[0].stride(0),
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
        check_rows(x)
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
        check_rows(x)
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
        check_rows(gate_up)
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.shape[1] == 2 * dim
        out = self._result(out, rows, dim, dtype=gate_up.dtype)
        kernels.gated(
            kind=GATES[activation],
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

    def linear_act(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Activation,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply the activation before the sums leave the cache."""
        return self._linear(x, weight, bias, x.dtype, out=out, activation=activation)

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        return self._unary(_GELU[approximate], x, out)

    def silu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._unary(_SILU, x, out)

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
        check_rows(x)
        rows, dim = x.shape
        of_all = y.dim() == 1
        assert y.shape == ((dim,) if of_all else x.shape)
        assert y.stride(-1) == 1
        assert x.dtype == y.dtype
        out = self._result(out, rows, dim, dtype=x.dtype)
        kernels.add(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=0 if of_all else y.stride(0),
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
        assert x.stride(-1) == out.stride(-1) == 1
        assert factor.shape[-1] == 1 or factor.stride(-1) == 1
        assert x.dtype == factor.dtype == out.dtype
        assert factor.shape in (x.shape, (*x.shape[:-1], 1), (dim,), (x.shape[0], 1), (1,))
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
            kind=GATES[activation],
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
        check_rows(x)
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

    def clip(self, x: Tensor, bounds: Tensor, out: Tensor | None = None) -> Tensor:
        assert x.dim() == 2
        assert x.stride(1) == 1
        assert bounds.shape == (2,)
        assert bounds.dtype == "float32"
        out = self._result(out, *x.shape, dtype=x.dtype)
        kernels.clip(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=x.shape[0],
            dim=x.shape[1],
            bounds=bounds.data_ptr(),
            dtype=DTYPE_CODES[x.dtype],
        )
        return out

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
        """Copy the rows, also from a packed weight. Ids outside of the table yield NaN.

        A table may have int32 numbers, whose bits are copied like those of float32.
        """
        assert ids.dtype == "int64"
        assert ids.is_contiguous()
        packed = isinstance(weight, PackedWeight)
        if isinstance(weight, PackedWeight | QuantizedWeight):
            assert weight.panel == _native.panel(), "weight was packed for another instruction set"
            table, n, dim, stride = weight.data, weight.n, weight.k, 0
        else:
            check_rows(weight)
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
                format=QUANT_FORMATS[weight.format],
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
            dtype=DTYPE_CODES["float32" if weight.dtype == "int32" else weight.dtype],
        )
        return out
