"""Matrix product whose results do not depend on the number of rows.

cuBLAS chooses the kernel, and so the order of summation, by the number of rows. Here only the shape
of the weight decides how K is cut into splits. A result is the sum of its splits' sums, from first
to last, and every split is summed in the same order for every batch. With few rows each split has a
program of its own, and a second kernel adds the splits' sums. With many rows one program computes
all splits and adds their sums.

The weight is the left operand. So the matrix instructions for different numbers of rows differ in
their number of columns only, which changes no order of summation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.weights import PackedWeight
from octavo.system.device import cuda_shared_memory

STEP = 128
"""Inputs of a split are a multiple of this, whatever the tile."""
SUM_BLOCK = 512
_FEWEST_SHARED = 99 * 1024  # bytes, on cards of capability 8.6, 8.9 and 12.0
_LONGEST_SPLIT = 4096
_MOST_PROGRAMS = 256  # of one row with several splits: about two for each multiprocessor


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program.

    Attributes:
        rows: rows of x.
        n: rows of the weight.
        k: inputs.
        warps: `num_warps`.
        stages: `num_stages`.
        apart: True if each split has a program of its own.
    """

    rows: int
    n: int
    k: int
    warps: int
    stages: int
    apart: bool = False


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; off a GPU, `_FEWEST_SHARED`."""
    return cuda_shared_memory(device) if device.type == "cuda" else _FEWEST_SHARED


def count_splits(n: int, k: int, longest: int) -> int:
    """Return the number of splits of a weight [n, k], a power of two.

    It is the first one that makes splits of at most `longest` inputs; but if one row would then
    have more than `_MOST_PROGRAMS` programs, it is smaller.
    """
    splits = 1
    while 2 * splits * triton.cdiv(n, 64) <= _MOST_PROGRAMS and k > splits * longest:
        splits *= 2
    return splits


@triton.jit
def place(rows, n, TILE_R: tl.constexpr, TILE_N: tl.constexpr):
    """Return the number of this program's tile along the rows and along the outputs.

    Eight tiles of rows share outputs in the L2 cache.
    """
    GROUP: tl.constexpr = 8
    tile = tl.program_id(0)
    tiles_r = tl.cdiv(rows, TILE_R)
    in_group = GROUP * tl.cdiv(n, TILE_N)
    first = (tile // in_group) * GROUP
    size = tl.minimum(tiles_r - first, GROUP)
    return first + (tile % in_group) % size, (tile % in_group) // size


@triton.jit
def store(out, acc, bias, m_at, n_at, rows, n, HAS_BIAS: tl.constexpr):
    """Add the bias to a tile [outputs, rows] of the result, and round it into `out` [rows, n]."""
    n_in = n_at < n
    if HAS_BIAS:
        acc += tl.load(bias + n_at, mask=n_in, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + m_at[None, :] * n + n_at[:, None],
        acc.to(out.dtype.element_ty),
        mask=(m_at < rows)[None, :] & n_in[:, None],
    )


@triton.jit(do_not_specialize=["size"])  # it changes from step to step
def _add_splits(
    parts, bias, out, size, n, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + size.to(tl.int64) * split + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def add_splits(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add the splits' sums, float32 [splits, T, N], and the bias [N] into `out` [T, N]."""
    size = out.numel()
    _add_splits[(triton.cdiv(size, SUM_BLOCK),)](
        parts,
        out if bias is None else bias,
        out,
        size,
        out.shape[1],
        HAS_BIAS=bias is not None,
        SPLITS=len(parts),
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )


@triton.jit
def add_split(
    a_at,
    b_at,
    k_at,
    begin,
    end,
    k,
    m_in,
    n_in,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return the sum of the steps from `begin` to `end`: [outputs, rows]."""
    acc = tl.zeros([TILE_N, TILE_R], dtype=tl.float32)
    for step in range(begin, end):
        start = step * TILE_K
        if WHOLE:
            a = tl.load(a_at + start, mask=m_in[:, None], other=0.0)
            b = tl.load(b_at + start, mask=n_in[:, None], other=0.0)
        else:
            k_in = (start + k_at < k)[None, :]
            a = tl.load(a_at + start, mask=m_in[:, None] & k_in, other=0.0)
            b = tl.load(b_at + start, mask=n_in[:, None] & k_in, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    splits,
    each,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    APART: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply; with APART, each program stores one split into `out`, float32 [splits, rows, n].

    `each` is the number of inputs of a split.
    """
    tile_r, tile_n = place(rows, n, TILE_R, TILE_N)
    k_at = tl.arange(0, TILE_K)
    row, column = tl.arange(0, TILE_R), tl.arange(0, TILE_N)
    m_at = (tile_r * TILE_R + row).to(tl.int64)
    n_at = (tile_n * TILE_N + column).to(tl.int64)
    m_in = m_at < rows
    n_in = n_at < n
    a_at = x + tile_r.to(tl.int64) * TILE_R * x_stride
    a_at = a_at + row[:, None] * x_stride + k_at[None, :]
    b_at = weight + tile_n.to(tl.int64) * TILE_N * weight_stride
    b_at = b_at + column[:, None] * weight_stride + k_at[None, :]
    steps = tl.cdiv(k, TILE_K)
    each //= TILE_K
    total = tl.zeros([TILE_N, TILE_R], dtype=tl.float32)
    for split in range(tl.program_id(1), splits, tl.num_programs(1)):
        begin = split * each
        end = tl.minimum(begin + each, steps)
        total += add_split(
            a_at, b_at, k_at, begin, end, k, m_in, n_in, UPCAST, WHOLE, TILE_R, TILE_N, TILE_K
        )
    if APART:
        out += tl.program_id(1).to(tl.int64) * rows * n
    store(out, total, bias, m_at, n_at, rows, n, HAS_BIAS)


def tile_of(rows: int, element_size: int, shared: int) -> Tile:
    """Return the tile for a number of rows.

    Args:
        rows: number of rows of x.
        element_size: bytes of a number of x.
        shared: result of `shared_memory`.
    """
    if element_size == 4:
        return Tile(16, 64, 64, 4, 3, True) if rows <= 16 else Tile(64, 64, 32, 4, 4, rows <= 256)
    if rows <= 16:
        return Tile(16, 64, 128, 4, 4, True)
    if rows <= 256:
        return Tile(64, 64, 128, 4, 4 if shared >= 2**17 else 3, True)
    if rows <= 1024 or shared < 144 * 1024:
        return Tile(128, 128, 64, 8, 3)
    return Tile(256, 128, 64, 8, 3)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, upcast: bool
) -> Tensor:
    """Multiply x [T, K] by weight [N, K] transposed and add bias [N], rounding once: [T, N].

    `upcast`: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    tile = tile_of(rows, x.element_size(), shared_memory(x.device))
    splits = count_splits(n, k, _LONGEST_SPLIT)
    apart = tile.apart and splits > 1
    parts, added = out, bias
    if apart:
        parts, added = torch.empty(splits, rows, n, device=x.device), None
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n)
    _linear[(tiles, splits if apart else 1)](
        x,
        weight,
        x if added is None else added,
        parts,
        rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        splits,
        triton.cdiv(triton.cdiv(k, STEP), splits) * STEP,
        HAS_BIAS=added is not None,
        UPCAST=upcast,
        WHOLE=k % tile.k == 0,
        APART=apart,
        TILE_R=tile.rows,
        TILE_N=tile.n,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if apart:
        add_splits(parts, bias, out)
    return out


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _head_linear(
    x,
    weight,
    out,
    rows,
    n,
    k,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tile_r, tile_n = place(rows, n, TILE_R, TILE_N)
    head = tl.program_id(1).to(tl.int64)
    k_at = tl.arange(0, TILE_K)
    m_at = (tile_r * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n_at = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    m_in = m_at < rows
    n_in = n_at < n
    a_at = x + head * x_head_stride + m_at[:, None] * x_stride + k_at[None, :]
    b_at = weight + (head * n + n_at)[:, None] * k + k_at[None, :]
    end = tl.cdiv(k, TILE_K)
    acc = add_split(a_at, b_at, k_at, 0, end, k, m_in, n_in, UPCAST, WHOLE, TILE_R, TILE_N, TILE_K)
    tl.store(
        out + head * out_head_stride + m_at[None, :] * out_stride + n_at[:, None],
        acc.to(out.dtype.element_ty),
        mask=m_in[None, :] & n_in[:, None],
    )


def head_linear(
    x: Tensor, weight: PackedWeight, num_heads: int, out: Tensor | None, *, upcast: bool
) -> Tensor:
    """Implement `Ops.head_linear`; the whole of K is one sum. `upcast` is as in `linear`."""
    rows, _, k = x.shape
    n = weight.n // num_heads
    if out is None:
        out = torch.empty(rows, num_heads, n, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile_of(min(rows, 1024), x.element_size(), shared_memory(x.device))
    _head_linear[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n), num_heads)](
        x,
        weight.data,
        out,
        rows,
        n,
        k,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        UPCAST=upcast,
        WHOLE=k % tile.k == 0,
        TILE_R=tile.rows,
        TILE_N=tile.n,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
