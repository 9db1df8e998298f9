"""Matrix products with quantized weights, with one tile for every number of rows as in gemm.py.

int8: activations become int8, too, with a scale for each token (Dettmers et al., "LLM.int8()",
section 2.1, the row-wise half). Sums are integers.

Other formats: activations stay in the model's type. Each program converts a tile of codes to
numbers in units of their scales, which every type holds exactly (nf4: float32 only). It multiplies
the sum of a tile, which has one scale for each output, by these scales in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.base import Codes, QuantFormat, QuantizedWeight
from octavo.kernels.dequantize import NF4_LEVELS
from octavo.kernels.reference import LEVELS
from octavo.kernels.triton import fp8, gemm

_TILE_M, _TILE_N = 64, 64
_BLOCK = 1024

_KINDS: dict[QuantFormat, str] = {
    "int4_levels": "levels",
    "nf4": "levels",
    "int4": "middle",
    "int4_zeros": "zeros",
    "int8_groups": "zeros",
    "fp8": "fp8",
}
"""Conversion of a format's codes, see `_numbers`."""
_FOUR_BITS = ("int4_levels", "nf4", "int4", "int4_zeros")
_HALF_SCALES = ("int4_levels", "int4", "int4_zeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesWeight(QuantizedWeight):
    """Weight of codes in plain rows.

    Attributes:
        data: int8: the codes minus 128, int8 [N, K]. 4 bits: uint8 [N, groups * group_size / 2],
            where byte i of a group has input i in its low half and input i + group_size / 2 in its
            high half. Others: uint8 [N, K].
        scales: [N, groups]; float16 for int4_levels, int4 and int4_zeros, else float32.
        zeros: uint8 [N, groups] for int4_zeros and int8_groups.
        levels: float32 [16], the numbers of the codes, for int4_levels and nf4.
    """

    scales: Tensor
    zeros: Tensor | None
    levels: Tensor | None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        tensors = (self.data, self.scales, self.zeros, self.levels, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pack(
    n: int,
    k: int,
    format: QuantFormat,
    group_size: int,
    parts: Iterable[Codes],
    order: Tensor | None,
) -> CodesWeight:
    """Implement `Ops.pack_quantized`; parts and `order`, int32 [K], are on the device."""
    codes, scales, zeros = [], [], []
    for part in parts:
        codes.append(_pack_codes(cast(Tensor, part.codes), format, group_size))
        scale = cast(Tensor, part.scales)
        scales.append(scale.half() if format in _HALF_SCALES else scale)
        zeros += [] if part.zeros is None else [cast(Tensor, part.zeros)]
    data = torch.cat(codes)
    assert data.shape[0] == n
    levels = {"int4_levels": LEVELS / 16, "nf4": torch.from_numpy(NF4_LEVELS).float()}.get(format)
    return CodesWeight(
        data,
        n,
        k,
        format,
        group_size,
        panel=0,
        order=order,
        scales=torch.cat(scales),
        zeros=torch.cat(zeros) if zeros else None,
        levels=None if levels is None else levels.to(data.device),
    )


def _pack_codes(codes: Tensor, format: QuantFormat, group_size: int) -> Tensor:
    """Return the codes [rows, K] in the layout of `CodesWeight`."""
    if format == "int8":
        return (codes.to(torch.int16) - 128).to(torch.int8)
    if format not in _FOUR_BITS:
        return codes
    padded = F.pad(codes, (0, -codes.shape[1] % group_size))
    low, high = padded.view(len(codes), -1, 2, group_size // 2).unbind(2)
    return (low | high << 4).flatten(1)


@triton.jit
def _to_int8(x, out, scales, x_stride, k, BLOCK: tl.constexpr):
    """Quantize one row: its largest magnitude becomes 127."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, k, BLOCK):
        v = tl.load(x + row * x_stride + start + lanes, mask=start + lanes < k, other=0.0)
        v = v.to(tl.float32)
        broken |= (v != v).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(v))
    most = tl.max(largest, axis=0)
    some = most >= 1e-35
    inverse = tl.div_rn(tl.full([], 127.0, tl.float32), tl.where(some, most, 1.0))
    inverse = tl.where(some & (most < float("inf")), inverse, 0.0)
    scale = tl.where(some, tl.div_rn(most, tl.full([], 127.0, tl.float32)), 0.0)
    scale = tl.where(tl.max(broken, axis=0) == 0, scale, float("nan"))
    tl.store(scales + row, scale)
    for start in range(0, k, BLOCK):
        mask = start + lanes < k
        v = tl.load(x + row * x_stride + start + lanes, mask=mask, other=0.0).to(tl.float32)
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0) * inverse
        # Adding 1.5 * 2^23, above which float32 has only whole numbers, rounds to a whole number.
        v = (v + 12582912.0) - 12582912.0
        tl.store(out + row * k + start + lanes, v.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _linear_int8(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m_at, n_at = gemm.place(rows, n, TILE_M, TILE_N)
    k_at = tl.arange(0, TILE_K)
    m_in = m_at < rows
    n_in = n_at < n
    a_at = x + m_at[:, None] * k + k_at[None, :]
    b_at = weight + n_at[None, :] * k + k_at[:, None]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.int32)
    for start in range(0, k, TILE_K):
        k_in = start + k_at < k
        a = tl.load(a_at + start, mask=m_in[:, None] & k_in[None, :], other=0)
        b = tl.load(b_at + start, mask=n_in[None, :] & k_in[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    y = acc.to(tl.float32) * tl.load(x_scales + m_at, mask=m_in, other=0.0)[:, None]
    y *= tl.load(scales + n_at, mask=n_in, other=0.0)[None, :]
    gemm.store(out, y, bias, m_at, n_at, rows, n, HAS_BIAS)


@triton.jit
def _numbers(codes, zeros, levels, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of codes, in units of their scales."""
    if KIND == "fp8":
        x = fp8.decode(codes, 1)
    elif KIND == "levels":
        x = tl.load(levels + codes.to(tl.int32))
    else:
        x = codes.to(tl.int32) - zeros
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _linear_codes(
    x,
    weight,
    scales,
    zeros,
    levels,
    bias,
    out,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    groups,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    KIND: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply; TILE_K divides GROUP_SIZE, and is half of it with FOUR_BITS."""
    DTYPE: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    STEP: tl.constexpr = 2 * TILE_K if FOUR_BITS else TILE_K
    m_at, n_at = gemm.place(rows, n, TILE_M, TILE_N)
    k_at = tl.arange(0, TILE_K)
    m_in = m_at < rows
    n_in = n_at < n
    a_at = x + m_at[:, None] * x_stride + k_at[None, :]
    b_at = weight + n_at[None, :] * weight_stride + k_at[:, None]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, k, STEP):
        group = n_at * groups
        if GROUP_SIZE:
            group += start // GROUP_SIZE
        scale = tl.load(scales + group, mask=n_in, other=0.0).to(tl.float32)
        zero = 8
        if KIND == "zeros":
            zero = tl.load(zeros + group, mask=n_in, other=0).to(tl.int32)[None, :]
        k_in = start + k_at < k
        a = tl.load(a_at + start, mask=m_in[:, None] & k_in[None, :], other=0.0).to(DTYPE)
        if FOUR_BITS:
            high_in = start + TILE_K + k_at < k
            mask = m_in[:, None] & high_in[None, :]
            high_a = tl.load(a_at + start + TILE_K, mask=mask, other=0.0).to(DTYPE)
            codes = tl.load(b_at + start // 2, mask=n_in[None, :], other=0)
            b = _numbers(codes & 15, zero, levels, KIND, DTYPE)
            part = tl.dot(a, b, input_precision="ieee")
            b = _numbers(codes >> 4, zero, levels, KIND, DTYPE)
            part = tl.dot(high_a, b, part, input_precision="ieee")
        else:
            codes = tl.load(b_at + start, mask=n_in[None, :] & k_in[:, None], other=0)
            b = _numbers(codes, zero, levels, KIND, DTYPE)
            part = tl.dot(a, b, input_precision="ieee")
        acc += part * scale[None, :]
    gemm.store(out, acc, bias, m_at, n_at, rows, n, HAS_BIAS)


def linear(
    x: Tensor, weight: CodesWeight, bias: Tensor | None, out_dtype: torch.dtype, *, upcast: bool
) -> Tensor:
    """Multiply x [T, K] by the transposed weight and add bias [N], rounding once: [T, N].

    `upcast`: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    if weight.order is not None:
        x = x.index_select(1, cast(Tensor, weight.order))
    (rows, k), n = x.shape, weight.n
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    tiles = triton.cdiv(rows, _TILE_M) * triton.cdiv(n, _TILE_N)
    data = cast(Tensor, weight.data)
    if weight.format == "int8":
        q, x_scales = to_int8(x)
        _linear_int8[(tiles,)](
            q,
            x_scales,
            data,
            weight.scales,
            x if bias is None else bias,
            out,
            rows,
            n,
            k,
            HAS_BIAS=bias is not None,
            TILE_M=_TILE_M,
            TILE_N=_TILE_N,
            TILE_K=128,
            num_warps=4,
            num_stages=4,
        )
        return out
    four_bits, group = weight.format in _FOUR_BITS, weight.group_size
    widest = 64 if x.element_size() == 2 else 32
    _linear_codes[(tiles,)](
        x,
        data,
        weight.scales,
        x if weight.zeros is None else weight.zeros,
        x if weight.levels is None else weight.levels,
        x if bias is None else bias,
        out,
        rows,
        n,
        k,
        x.stride(0),
        data.stride(0),
        weight.scales.stride(0),
        HAS_BIAS=bias is not None,
        UPCAST=upcast,
        KIND=_KINDS[weight.format],
        FOUR_BITS=four_bits,
        GROUP_SIZE=group,
        TILE_M=_TILE_M,
        TILE_N=_TILE_N,
        TILE_K=group // 2 if four_bits else min(group or widest, widest),
        num_warps=4,
        num_stages=3,
    )
    return out


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] row by row: int8 [T, K], and the rows' scales float32 [T].

    A row with numbers that are not finite has a scale that is not finite.
    """
    rows, k = x.shape
    out = torch.empty(rows, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _to_int8[(rows,)](x, out, scales, x.stride(0), k, BLOCK=_BLOCK)
    return out, scales
