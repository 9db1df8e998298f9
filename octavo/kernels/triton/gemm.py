"""Matrix product that uses the same tile for every number of rows.

cuBLAS chooses the kernel, and so the order of summation, by the number of rows. Here every output
is the sum of the same tiles of K in the same order for every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_M, _TILE_N, _TILE_K = 64, 64, 64


@triton.jit
def place(rows, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return the rows and the columns of this program's tile of the result, int64.

    Eight tiles of rows share columns in the L2 cache.
    """
    GROUP: tl.constexpr = 8
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(rows, TILE_M)
    in_group = GROUP * tl.cdiv(n, TILE_N)
    first = (tile // in_group) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + (tile % in_group) % size
    tile_n = (tile % in_group) // size
    m_at = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    n_at = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    return m_at, n_at


@triton.jit
def store(out, acc, bias, m_at, n_at, rows, n, HAS_BIAS: tl.constexpr):
    """Add the bias to a tile of the result, and round it into `out` [rows, n]."""
    n_in = n_at < n
    if HAS_BIAS:
        acc += tl.load(bias + n_at, mask=n_in, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m_at[:, None] * n + n_at[None, :],
        acc.to(out.dtype.element_ty),
        mask=(m_at < rows)[:, None] & n_in[None, :],
    )


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
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m_at, n_at = place(rows, n, TILE_M, TILE_N)
    k_at = tl.arange(0, TILE_K)
    m_in = m_at < rows
    n_in = n_at < n
    a_at = x + m_at[:, None] * x_stride + k_at[None, :]
    b_at = weight + n_at[None, :] * weight_stride + k_at[:, None]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, k, TILE_K):
        k_in = start + k_at < k
        a = tl.load(a_at + start, mask=m_in[:, None] & k_in[None, :], other=0.0)
        b = tl.load(b_at + start, mask=n_in[None, :] & k_in[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    store(out, acc, bias, m_at, n_at, rows, n, HAS_BIAS)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, upcast: bool
) -> Tensor:
    """Multiply x [T, K] by weight [N, K] transposed and add bias [N], rounding once: [T, N].

    `upcast`: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    if rows:
        tiles = triton.cdiv(rows, _TILE_M) * triton.cdiv(n, _TILE_N)
        _linear[(tiles,)](
            x,
            weight,
            x if bias is None else bias,
            out,
            rows,
            n,
            k,
            x.stride(0),
            weight.stride(0),
            HAS_BIAS=bias is not None,
            UPCAST=upcast,
            TILE_M=_TILE_M,
            TILE_N=_TILE_N,
            TILE_K=_TILE_K if x.element_size() == 2 else _TILE_K // 2,
            num_warps=4,
            num_stages=4,
        )
    return out
