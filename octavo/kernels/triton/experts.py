"""Products of a mixture of experts; a row's bits depend neither on the other rows nor on its place.

Pairs of a token and an expert are sorted by expert. A program multiplies a tile of rows of one
expert by a tile of its weight, with the inner loops of gemm.py and quantized.py. Weights of experts
are separate tensors: a program reads the address of its expert's weight from a table. K is not
split, since many experts are enough to fill a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.routing import ExpertActivation
from octavo.kernels.triton import activation as activations
from octavo.kernels.triton import gemm, quantized, unpack
from octavo.kernels.weights import PackedWeight, QuantizedWeight, StackedWeight

_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedCodes(StackedWeight):
    """Weights of codes of all experts.

    Attributes:
        scales: int64 [experts]: addresses of `CodesWeight.scales`.
        zeros: int64 [experts]: addresses of `CodesWeight.zeros`; None: there are none.
        orders: int32 [experts, K]: the orders of inputs; None: the inputs are in order.
    """

    scales: Tensor
    zeros: Tensor | None
    orders: Tensor | None


def stack(
    weights: Sequence[PackedWeight | QuantizedWeight | None], bias: Tensor | None
) -> StackedWeight:
    """Implement `Ops.stack`."""
    present = [weight for weight in weights if weight is not None]
    assert len(present) == len(weights), "experts are divided on a CPU only"

    def addresses(tensors: Sequence[Any]) -> Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], device=tensors[0].device)

    data = addresses([weight.data for weight in present])
    codes = [weight for weight in present if isinstance(weight, quantized.CodesWeight)]
    if not codes:
        assert all(isinstance(weight, PackedWeight) for weight in present)
        return StackedWeight(tuple(weights), bias, data)
    zeros = [weight.zeros for weight in codes if weight.zeros is not None]
    orders = [cast(Tensor, weight.order) for weight in codes if weight.order is not None]
    return StackedCodes(
        tuple(weights),
        bias,
        data,
        scales=addresses([weight.scales for weight in codes]),
        zeros=addresses(zeros) if zeros else None,
        orders=torch.stack(orders) if orders else None,
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a token and one of its experts, sorted by expert, then by token.

    Attributes:
        ids: int32 [pairs], the expert of each row.
        order: int64 [pairs], the pair of each row: token * K + choice.
        places: int32 [T, K], the row of each pair.
        bounds: int64 [experts + 1], the first row of each expert, and the end of the last one's.
    """

    ids: Tensor
    order: Tensor
    places: Tensor
    bounds: Tensor
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Pairs:
        """Sort the pairs of ids, int32 [T, K], without waiting for the device."""
        found, order = ids.flatten().sort(stable=True)
        rows = torch.arange(len(order), dtype=torch.int32, device=ids.device)
        places = torch.empty_like(rows).scatter_(0, order, rows)
        every = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
        return cls(found, order, places.view(ids.shape), torch.searchsorted(found, every))

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.bounds) - 1

    def tile_ends(self, rows: int) -> Tensor:
        """Return the end of each expert's tiles of some rows: int64 [experts]."""
        if rows not in self._tiles:
            counts = self.bounds.diff()
            self._tiles[rows] = ((counts + (rows - 1)) // rows).cumsum(0)
        return self._tiles[rows]

    def most_tiles(self, rows: int) -> int:
        """Return an upper bound of the number of tiles."""
        return min(len(self.order), len(self.order) // rows + self.experts)


@triton.jit
def find_tile(bounds, tile_ends, experts, tile, TILE_R: tl.constexpr):
    """Return the expert of a tile, the rows [TILE_R] of the tile, and which of these exist.

    The last result is the end of the expert's rows. The expert is `experts` if there is no such
    tile, since the grid has room for the most possible tiles.
    """
    low = tl.full([], 0, tl.int32)
    high = low + experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    there = low < experts
    end = tl.load(bounds + low + 1, mask=there, other=0)
    before = tl.load(tile_ends + low - 1, mask=there & (low > 0), other=0)
    begin = tl.load(bounds + low, mask=there, other=0) + (tile - before) * TILE_R
    m_at = begin + tl.arange(0, TILE_R)
    return low, m_at, m_at < end, end


@triton.jit
def _pointer(addresses, expert, DTYPE: tl.constexpr):
    """Return the pointer in a table; tensors of torch begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["experts"])
def _experts(
    x,
    sources,
    addresses,
    bias,
    out,
    bounds,
    tile_ends,
    experts,
    n,
    k,
    x_stride,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply rows `sources` [pairs] of x by the weights of their experts."""
    expert, m_at, m_in, end = find_tile(bounds, tile_ends, experts, tl.program_id(0), TILE_R)
    if expert < experts:
        row = tl.load(sources + m_at, mask=m_in, other=0)
        n_at = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        n_in = n_at < n
        k_at = tl.arange(0, TILE_K)
        weight = _pointer(addresses, expert, x.dtype.element_ty)
        a_at = x + row[:, None] * x_stride + k_at[None, :]
        b_at = weight + n_at[:, None] * k + k_at[None, :]
        end_k = tl.cdiv(k, TILE_K)
        acc = gemm.add_split(
            a_at, b_at, k_at, 0, end_k, k, m_in, n_in, UPCAST, WHOLE, TILE_R, TILE_N, TILE_K
        )
        gemm.store(out, acc, bias + expert.to(tl.int64) * n, m_at, n_at, end, n, HAS_BIAS)


@triton.jit(do_not_specialize=["experts"])
def _experts_int8(
    x,
    x_scales,
    sources,
    addresses,
    scales,
    bias,
    out,
    bounds,
    tile_ends,
    experts,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply rows `sources` [pairs] of x, int8 with a scale each; see `quantized`."""
    expert, m_at, m_in, end = find_tile(bounds, tile_ends, experts, tl.program_id(0), TILE_R)
    if expert < experts:
        row = tl.load(sources + m_at, mask=m_in, other=0)
        n_at = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        n_in = n_at < n
        weight = _pointer(addresses, expert, tl.int8)
        acc = quantized.dot_int8(x, weight, row, n_at, m_in, n_in, k, WHOLE, TILE_R, TILE_N, TILE_K)
        y = acc.to(tl.float32) * tl.load(x_scales + row, mask=m_in, other=0.0)[None, :]
        own = _pointer(scales, expert, tl.float32)
        y *= tl.load(own + n_at, mask=n_in, other=0.0)[:, None]
        gemm.store(out, y, bias + expert.to(tl.int64) * n, m_at, n_at, end, n, HAS_BIAS)


@triton.jit(do_not_specialize=["experts"])
def _experts_codes(
    x,
    sources,
    addresses,
    scales,
    zeros,
    levels,
    bias,
    out,
    bounds,
    tile_ends,
    experts,
    n,
    k,
    x_stride,
    blocks,
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
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows `sources` [pairs] of x by codes; see `quantized`."""
    DTYPE: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    SCALE: tl.constexpr = tl.int32 if PAIRS or FORMAT == "int4_zeros" else tl.float32
    expert, m_at, m_in, end = find_tile(bounds, tile_ends, experts, tl.program_id(0), TILE_R)
    if expert < experts:
        row = tl.load(sources + m_at, mask=m_in, other=0)
        tile_n = tl.program_id(1)
        n_at = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        k_at = tl.arange(0, WORDS)
        a_at = x + row[:, None] * x_stride + k_at[None, :]
        weight = _pointer(addresses, expert, tl.int16)
        words_at, lanes = quantized.panels(weight, tile_n, n, blocks, TILE_N, WORDS)
        scales_at = _pointer(scales, expert, SCALE) + lanes
        zeros_at = _pointer(zeros, expert, tl.float32) + lanes
        n_padded = tl.cdiv(n, 64) * 64
        acc = quantized.add_split(
            a_at,
            k_at,
            words_at,
            scales_at,
            zeros_at,
            levels,
            0,
            blocks,
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
        gemm.store(out, acc, bias + expert.to(tl.int64) * n, m_at, n_at, end, n, HAS_BIAS)


@triton.jit
def _gather(x, sources, ids, orders, out, k, x_stride, BLOCK: tl.constexpr):
    """Copy a row of x with its columns in the order of the row's expert."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < k
    column = tl.load(orders + tl.load(ids + row).to(tl.int64) * k + at, mask=mask, other=0)
    source = x + tl.load(sources + row) * x_stride
    tl.store(out + row * k + at, tl.load(source + column, mask=mask, other=0.0), mask=mask)


@triton.jit
def _sum_experts(
    x,
    places,
    weights,
    out,
    n,
    x_stride,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        row = tl.load(places + token * TOP_K + choice).to(tl.int64)
        v = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            v *= tl.load(weights + token * TOP_K + choice)
        total += v
    tl.store(out + token * n + at, total.to(out.dtype.element_ty), mask=mask)


def sum_experts(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Implement `Ops.sum_experts`."""
    (tokens, top_k), n = places.shape, x.shape[1]
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if tokens:
        _sum_experts[(tokens, triton.cdiv(n, _BLOCK))](
            x,
            places.contiguous(),
            x if weights is None else weights.contiguous(),
            out,
            n,
            x.stride(0),
            TOP_K=top_k,
            WEIGHTED=weights is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    return out


def experts(
    x: Tensor,
    ids: Tensor,
    up: StackedWeight | None,
    down: StackedWeight | None,
    activation: ExpertActivation | None,
    factors: Tensor | None,
    inner: Tensor | None,
    *,
    upcast: bool,
) -> tuple[Tensor, Tensor]:
    """Implement `Ops.experts`; `upcast` is as in `gemm.linear`."""
    stacked = up or down
    assert stacked is not None
    pairs = Pairs.of(ids, len(stacked.weights))
    if up is not None:
        sources = pairs.order // ids.shape[1]
        if factors is not None:
            rows = x.index_select(0, sources).float()
            x = (rows * factors.flatten()[pairs.order, None]).to(x.dtype)
            sources = None
        inner = multiply(x, sources, up, pairs, upcast=upcast)
        if activation is not None:
            inner = activate(inner, activation)
    assert inner is not None
    if down is None:
        return inner, pairs.places
    return multiply(inner, None, down, pairs, upcast=upcast), pairs.places


def activate(x: Tensor, activation: ExpertActivation) -> Tensor:
    """Apply the activation of experts to results of the first product."""
    if activation.gated:
        return activations.act_and_mul(x, activation.name, activation.limit)
    return activations.act(x, activation.name)


def multiply(
    x: Tensor, sources: Tensor | None, stacked: StackedWeight, pairs: Pairs, *, upcast: bool
) -> Tensor:
    """Multiply the rows of all pairs by the weights of their experts: [pairs, N].

    Args:
        x: [rows, K].
        sources: int64 [pairs], the row of x for each row of the result; None: the same row.
        stacked: the weights.
        pairs: the pairs.
        upcast: as in `gemm.linear`.
    """
    weight, rows = stacked.first, len(pairs.order)
    out = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if sources is None:
        sources = torch.arange(rows, device=x.device)
    args: tuple[Tensor, Tensor, StackedWeight, Pairs, Tensor] = x, sources, stacked, pairs, out
    if not isinstance(stacked, StackedCodes):
        _multiply_plain(*args, upcast=upcast)
        return out
    if stacked.orders is not None:
        ordered = torch.empty(rows, weight.k, dtype=x.dtype, device=x.device)
        grid = rows, triton.cdiv(weight.k, _BLOCK)
        orders = stacked.orders
        _gather[grid](x, sources, pairs.ids, orders, ordered, weight.k, x.stride(0), BLOCK=_BLOCK)
        args = ordered, torch.arange(rows, device=x.device), stacked, pairs, out
    if weight.format == "int8":  # type: ignore[union-attr]
        _multiply_int8(*args)
    else:
        _multiply_codes(*args, upcast=upcast)
    return out


def _rows_of_expert(pairs: Pairs) -> int:
    """Return the mean number of rows of an expert, by which the tile is chosen."""
    return -(-len(pairs.order) // pairs.experts)


def _common(stacked: StackedWeight, pairs: Pairs, tile: gemm.Tile) -> dict[str, Any]:
    """Return the arguments that all kernels have."""
    weight, bias = stacked.first, stacked.bias
    assert bias is None or bias.is_contiguous()
    return {
        "addresses": stacked.addresses,
        "bias": stacked.addresses if bias is None else bias,
        "bounds": pairs.bounds,
        "tile_ends": pairs.tile_ends(tile.rows),
        "experts": pairs.experts,
        "n": weight.n,
        "k": weight.k,
        "HAS_BIAS": bias is not None,
        "WHOLE": weight.k % tile.k == 0,
        "TILE_R": tile.rows,
        "TILE_N": tile.n,
        "num_warps": tile.warps,
    }


def _grid(pairs: Pairs, tile: gemm.Tile, n: int) -> tuple[int, int]:
    return pairs.most_tiles(tile.rows), triton.cdiv(n, tile.n)


def _multiply_plain(
    x: Tensor, sources: Tensor, stacked: StackedWeight, pairs: Pairs, out: Tensor, *, upcast: bool
) -> None:
    rows = min(_rows_of_expert(pairs), 1024)
    tile = gemm.tile_of(rows, x.element_size(), gemm.shared_memory(x.device))
    _experts[_grid(pairs, tile, stacked.first.n)](
        x=x,
        sources=sources,
        out=out,
        x_stride=x.stride(0),
        UPCAST=upcast,
        TILE_K=tile.k,
        num_stages=tile.stages,
        **_common(stacked, pairs, tile),
    )


def _multiply_int8(
    x: Tensor, sources: Tensor, stacked: StackedWeight, pairs: Pairs, out: Tensor
) -> None:
    assert isinstance(stacked, StackedCodes)
    q, x_scales = quantized.to_int8(x)
    tile = quantized.tile_of_int8(_rows_of_expert(pairs), gemm.shared_memory(x.device))
    _experts_int8[_grid(pairs, tile, stacked.first.n)](
        x=q,
        x_scales=x_scales,
        sources=sources,
        scales=stacked.scales,
        out=out,
        TILE_K=tile.k,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **_common(stacked, pairs, tile),
    )


def _multiply_codes(
    x: Tensor, sources: Tensor, stacked: StackedWeight, pairs: Pairs, out: Tensor, *, upcast: bool
) -> None:
    weight = stacked.first
    assert isinstance(stacked, StackedCodes)
    assert isinstance(weight, quantized.CodesWeight)
    words, planes = quantized.block_shape(weight.format, weight.group_size)
    rows, shared = _rows_of_expert(pairs), gemm.shared_memory(x.device)
    tile = quantized.tile_of(rows, x.element_size(), words * planes, shared)
    _experts_codes[_grid(pairs, tile, weight.n)](
        x=x,
        sources=sources,
        scales=stacked.scales,
        zeros=stacked.scales if stacked.zeros is None else stacked.zeros,
        levels=x if weight.levels is None else weight.levels,
        out=out,
        x_stride=x.stride(0),
        blocks=cast(Tensor, weight.data).shape[1],
        UPCAST=upcast,
        FORMAT=weight.format,
        KIND=quantized.KINDS[weight.format],
        PAIRS=weight.format in quantized.PAIRS,
        ASM=unpack.assembly_of(x, weight.format, quantized.KINDS[weight.format]),
        GROUP_SIZE=weight.group_size,
        PLANES=planes,
        WORDS=words,
        STAGES=tile.stages,
        enable_fp_fusion=False,
        **_common(stacked, pairs, tile),
    )
