"""Matrix products with quantized weights; a row's bits do not depend on the number of rows.

int8: activations become int8, too, with a scale for each token (Dettmers et al., "LLM.int8()",
section 2.1, the row-wise half). Sums are integers.

Other formats: activations stay in the model's type, and products are summed as in gemm.py. Each
program converts tiles of codes to numbers in units of their scales, which every type holds exactly
(nf4: float32 only). It multiplies the sum of a group by the group's scales in float32.
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

from octavo.kernels.triton import gemm, unpack
from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight

_PANEL = 64
_BLOCK = 1024
_LONGEST_SPLIT = 512

KINDS: dict[QuantFormat, str] = {
    "int4_levels": "levels",
    "nf4": "levels",
    "int4": "middle",
    "int4_zeros": "zeros",
    "int8_groups": "zeros",
    "fp8": "fp8",
}
"""Conversion of a format's codes, see `unpack`."""
_FOUR_BITS = ("int4_levels", "nf4", "int4", "int4_zeros")
PAIRS = ("int4_levels", "int4")
"""Formats whose scales of two groups share 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesWeight(QuantizedWeight):
    """Weight of codes.

    The inputs are padded to whole blocks, and the outputs to a multiple of 64, except with int8.

    Attributes:
        data: int8: the codes minus 128, int8 [N, K]. Others: int16 [N / 64, blocks, 64, words]:
            input i of a block is in word i % words, at bit i // words times the bits of a code.
        scales: int8: float32 [N]. int4_levels and int4: int32 [groups / 2, N], the float16 bits of
            an even group in the low half, those of the next in the high half. int4_zeros: int32
            [groups, N], the float16 bits in the low half, the zero in the high half. Others:
            float32 [groups, N].
        zeros: float32 [groups, N] for int8_groups.
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


def block_shape(format: QuantFormat, group_size: int) -> tuple[int, int]:
    """Return the number of words of a block, and of inputs in each word."""
    planes = 4 if format in _FOUR_BITS else 2
    return (64 if planes == 2 and group_size in (0, 128) else 32), planes


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
        codes.append(cast(Tensor, part.codes))
        scales.append(cast(Tensor, part.scales))
        zeros += [] if part.zeros is None else [cast(Tensor, part.zeros)]
        if format == "int8":
            codes[-1] = (codes[-1].to(torch.int16) - 128).to(torch.int8)
        elif format == "fp8":
            scales[-1] = _with_nan(codes[-1], scales[-1], group_size or k)
    assert sum(map(len, codes)) == n
    data, scale = torch.cat(codes), torch.cat(scales)
    zero = torch.cat(zeros) if zeros else None
    del codes
    if format == "int8":
        scale = scale[:, 0].contiguous()
    else:
        words, planes = block_shape(format, group_size)
        data = _pack_words(data, words, planes)
        groups = data.shape[1] * words * planes // group_size if group_size else 1
        scale, zero = _pack_scales(format, scale, zero, groups)
    levels = unpack.level_table(format)
    return CodesWeight(
        data,
        n,
        k,
        format,
        group_size,
        panel=0,
        order=order,
        scales=scale,
        zeros=zero,
        levels=None if levels is None else levels.to(data.device),
    )


def _with_nan(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the scales [rows, groups], with NaN for groups that have a code of NaN.

    Kernels read such a code as an ordinary number, so the scale must carry the NaN.
    """
    broken = F.pad(codes & 127 == 127, (0, -codes.shape[1] % group))
    return torch.where(broken.view(len(codes), -1, group).any(2), torch.nan, scales)


def _pack_words(codes: Tensor, words: int, planes: int) -> Tensor:
    """Return codes, uint8 [N, K], in the layout of `CodesWeight`."""
    rows, k = codes.shape
    padded = F.pad(codes, (0, -k % (words * planes), 0, -rows % _PANEL))
    each = padded.view(len(padded) // _PANEL, _PANEL, -1, planes, words)
    bits = 16 // planes
    data = each[:, :, :, 0].to(torch.int16)
    for plane in range(1, planes):
        data |= each[:, :, :, plane].to(torch.int16) << (bits * plane)
    return data.transpose(1, 2).contiguous()


def _pack_scales(
    format: QuantFormat, scales: Tensor, zeros: Tensor | None, groups: int
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zeros [N, groups] in the layout of `CodesWeight`."""

    def turned(x: Tensor) -> Tensor:
        return F.pad(x, (0, groups - x.shape[1], 0, -len(x) % _PANEL)).T.contiguous()

    if format in ("int4_levels", "int4"):
        pairs = turned(scales.half()).view(torch.int16).int()
        pairs = F.pad(pairs, (0, 0, 0, groups % 2)).view(-(-groups // 2), 2, -1)
        return pairs[:, 0] & 0xFFFF | pairs[:, 1] << 16, None
    if format == "int4_zeros":
        assert zeros is not None
        bits = turned(scales.half()).view(torch.int16).int() & 0xFFFF
        return bits | turned(zeros).int() << 16, None
    return turned(scales), None if zeros is None else turned(zeros.float())


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


@triton.jit
def dot_int8(
    x,
    weight,
    x_rows,
    n_at,
    m_in,
    n_in,
    k,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return the int32 sums of rows of x and of the weight, int8 [..., k]: [outputs, rows]."""
    k_at = tl.arange(0, TILE_K)
    a_at = x + x_rows[:, None] * k + k_at[None, :]
    b_at = weight + n_at[:, None] * k + k_at[None, :]
    acc = tl.zeros([TILE_N, TILE_R], dtype=tl.int32)
    for start in range(0, k, TILE_K):
        if WHOLE:
            a = tl.load(a_at + start, mask=m_in[:, None], other=0)
            b = tl.load(b_at + start, mask=n_in[:, None], other=0)
        else:
            k_in = (start + k_at < k)[None, :]
            a = tl.load(a_at + start, mask=m_in[:, None] & k_in, other=0)
            b = tl.load(b_at + start, mask=n_in[:, None] & k_in, other=0)
        acc = tl.dot(b, tl.trans(a), acc, out_dtype=tl.int32)
    return acc


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
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tile_r, tile_n = gemm.place(rows, n, TILE_R, TILE_N)
    m_at = (tile_r * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n_at = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    m_in = m_at < rows
    n_in = n_at < n
    acc = dot_int8(x, weight, m_at, n_at, m_in, n_in, k, WHOLE, TILE_R, TILE_N, TILE_K)
    y = acc.to(tl.float32) * tl.load(x_scales + m_at, mask=m_in, other=0.0)[None, :]
    y *= tl.load(scales + n_at, mask=n_in, other=0.0)[:, None]
    gemm.store(out, y, bias, m_at, n_at, rows, n, HAS_BIAS)


@triton.jit
def add_split(
    a_at,
    k_at,
    words_at,
    scales_at,
    zeros_at,
    levels,
    begin,
    end,
    k,
    n_padded,
    m_in,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    ASM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PLANES: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the sum of the blocks from `begin` to `end`: [outputs, rows]."""
    BLOCK: tl.constexpr = PLANES * WORDS
    # Planes with the same scales, and groups in a block.
    SHARE: tl.constexpr = PLANES if GROUP_SIZE == 0 else GROUP_SIZE // WORDS
    GROUPS: tl.constexpr = PLANES // SHARE
    BITS: tl.constexpr = 16 // PLANES
    acc = tl.zeros([TILE_N, TILE_R], dtype=tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + block * (64 * WORDS))
        scales = ()
        zeros = ()
        for group in tl.static_range(GROUPS if GROUP_SIZE else 0):
            at = block * GROUPS + group
            if PAIRS:
                bits = tl.load(scales_at + at // 2 * n_padded) >> (at % 2 * 16)
                scales = scales + (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
            elif FORMAT == "int4_zeros":
                both = tl.load(scales_at + at * n_padded)
                scales = scales + (both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
                zeros = zeros + ((both >> 16) & 15,)
            else:
                scales = scales + (tl.load(scales_at + at * n_padded),)
                if KIND == "zeros":
                    zeros = zeros + (tl.load(zeros_at + at * n_padded),)
        if ASM is not None:
            numbers = unpack.planes(words, zeros, FORMAT, KIND, ASM, PLANES, SHARE, DTYPE)
        for plane in tl.static_range(PLANES):
            start = block * BLOCK + plane * WORDS
            mask = m_in[:, None]
            if not WHOLE:
                mask = mask & (start + k_at < k)[None, :]
            a = tl.load(a_at + start, mask=mask, other=0.0).to(DTYPE)
            if ASM is None:
                zero = 8
                if KIND == "zeros":
                    zero = zeros[plane // SHARE].to(tl.int32)[:, None]
                codes = (words.to(tl.int32) >> (BITS * plane)) & (2**BITS - 1)
                b = unpack.one(codes, zero, levels, KIND, DTYPE)
            else:
                b = numbers[plane]
            if GROUP_SIZE == 0:
                acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
            else:
                if plane % SHARE == 0:
                    part = tl.dot(b, tl.trans(a), input_precision="ieee")
                else:
                    part = tl.dot(b, tl.trans(a), part, input_precision="ieee")
                if plane % SHARE == SHARE - 1:
                    by = scales[plane // SHARE][:, None].broadcast_to([TILE_N, TILE_R])
                    acc = tl.math.fma(part, by, acc)
    if GROUP_SIZE == 0:
        acc *= tl.load(scales_at)[:, None]
    return acc


@triton.jit
def panels(weight, tile_n, n, blocks, TILE_N: tl.constexpr, WORDS: tl.constexpr):
    """Return the addresses of the words [TILE_N, WORDS] of a tile's first block, and its outputs.

    A tile of 128 outputs may end after the last panel. It then reads the last panel again.
    """
    lanes = tl.arange(0, TILE_N)
    first = tile_n * (TILE_N // 64)
    panel = tl.minimum(lanes // 64, tl.cdiv(n, 64) - 1 - first)
    words_at = weight + first.to(tl.int64) * blocks * (64 * WORDS)
    words_at = words_at + panel[:, None] * blocks * (64 * WORDS)
    words_at += (lanes % 64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    return words_at, first * 64 + panel * 64 + lanes % 64


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
    blocks,
    splits,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    ASM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PLANES: tl.constexpr,
    WORDS: tl.constexpr,
    APART: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply; with APART, each program stores one split into `out`, float32 [splits, rows, n]."""
    DTYPE: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    tile_r, tile_n = gemm.place(rows, n, TILE_R, TILE_N)
    k_at = tl.arange(0, WORDS)
    row = tl.arange(0, TILE_R)
    m_at = (tile_r * TILE_R + row).to(tl.int64)
    n_at = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    n_padded = tl.cdiv(n, 64) * 64
    m_in = m_at < rows
    a_at = x + tile_r.to(tl.int64) * TILE_R * x_stride
    a_at = a_at + row[:, None] * x_stride + k_at[None, :]
    words_at, lanes = panels(weight, tile_n, n, blocks, TILE_N, WORDS)
    scales_at = scales + lanes
    zeros_at = zeros + lanes
    each = tl.cdiv(blocks, splits)
    total = tl.zeros([TILE_N, TILE_R], dtype=tl.float32)
    for split in range(tl.program_id(1), splits, tl.num_programs(1)):
        begin = split * each
        end = tl.minimum(begin + each, blocks)
        total += add_split(
            a_at,
            k_at,
            words_at,
            scales_at,
            zeros_at,
            levels,
            begin,
            end,
            k,
            n_padded,
            m_in,
            DTYPE,
            FORMAT,
            KIND,
            PAIRS,
            ASM,
            GROUP_SIZE,
            WHOLE,
            PLANES,
            WORDS,
            TILE_R,
            TILE_N,
            STAGES,
        )
    if APART:
        out += tl.program_id(1).to(tl.int64) * rows * n
    gemm.store(out, total, bias, m_at, n_at, rows, n, HAS_BIAS)


def tile_of(rows: int, element_size: int, block: int, shared: int) -> gemm.Tile:
    """Return the tile for a number of rows and a weight of codes.

    Args:
        rows: number of rows of x.
        element_size: bytes of a number of x.
        block: number of inputs of a block of codes.
        shared: result of `gemm.shared_memory`.
    """
    if rows <= 256 or element_size == 4:
        tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return gemm.Tile(tile, 64, block, 4, 3 if element_size == 2 else 1, True)
    if shared < 132 * 1024:
        return gemm.Tile(128, 64, block, 4, 2)
    return gemm.Tile(128, 128, block, 8, 3)


def tile_of_int8(rows: int, shared: int) -> gemm.Tile:
    """Return the tile for a number of rows and weights in int8."""
    if rows <= 16:
        return gemm.Tile(16, 64, 256, 4, 4)
    if rows <= 256:
        return gemm.Tile(64, 64, 256, 4, 4 if shared >= 2**17 else 3)
    return gemm.Tile(128, 128, 128, 4, 3)


def linear(
    x: Tensor, weight: CodesWeight, bias: Tensor | None, out_dtype: torch.dtype, *, upcast: bool
) -> Tensor:
    """Multiply x [T, K] by the transposed weight and add bias [N], rounding once: [T, N].

    `upcast`: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    if weight.order is not None:
        x = x.index_select(1, cast(Tensor, weight.order))
    out = torch.empty(len(x), weight.n, dtype=out_dtype, device=x.device)
    if len(x):
        if weight.format == "int8":
            _multiply_int8(x, weight, bias, out)
        else:
            _multiply_codes(x, weight, bias, out, upcast=upcast)
    return out


def _multiply_int8(x: Tensor, weight: CodesWeight, bias: Tensor | None, out: Tensor) -> None:
    (rows, k), n = x.shape, weight.n
    q, x_scales = to_int8(x)
    tile = tile_of_int8(rows, gemm.shared_memory(x.device))
    _linear_int8[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n),)](
        q,
        x_scales,
        cast(Tensor, weight.data),
        weight.scales,
        x if bias is None else bias,
        out,
        rows,
        n,
        k,
        HAS_BIAS=bias is not None,
        WHOLE=k % tile.k == 0,
        TILE_R=tile.rows,
        TILE_N=tile.n,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def _multiply_codes(
    x: Tensor, weight: CodesWeight, bias: Tensor | None, out: Tensor, *, upcast: bool
) -> None:
    (rows, k), n = x.shape, weight.n
    data, format, group_size = cast(Tensor, weight.data), weight.format, weight.group_size
    words, planes = block_shape(format, group_size)
    tile = tile_of(rows, x.element_size(), words * planes, gemm.shared_memory(x.device))
    splits = gemm.count_splits(n, k, _LONGEST_SPLIT)
    apart = tile.apart and splits > 1
    parts, added = out, bias
    if apart:
        parts, added = torch.empty(splits, rows, n, device=x.device), None
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n)
    _linear_codes[(tiles, splits if apart else 1)](
        x,
        data,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if weight.levels is None else weight.levels,
        x if added is None else added,
        parts,
        rows,
        n,
        k,
        x.stride(0),
        data.shape[1],
        splits,
        HAS_BIAS=added is not None,
        UPCAST=upcast,
        FORMAT=format,
        KIND=KINDS[format],
        PAIRS=format in PAIRS,
        ASM=unpack.assembly_of(x, format, KINDS[format]),
        GROUP_SIZE=group_size,
        WHOLE=k % tile.k == 0,
        PLANES=planes,
        WORDS=words,
        APART=apart,
        TILE_R=tile.rows,
        TILE_N=tile.n,
        STAGES=tile.stages,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    if apart:
        gemm.add_splits(parts, bias, out)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] row by row: int8 [T, K], and the rows' scales float32 [T].

    A row with numbers that are not finite has a scale that is not finite.
    """
    rows, k = x.shape
    out = torch.empty(rows, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    # Without fused multiply-adds: products are rounded before they become whole numbers.
    _to_int8[(rows,)](x, out, scales, x.stride(0), k, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out, scales
