"""Changes of adapters to the results of layers, for rows of many adapters in one call.

The two products of Punica (Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023), x A^T and then
its product with B^T, are a kernel each. A program has a tile of rows and a slot. It computes the
rows of the tile that have this slot, and ends at once if there are none. So the grid depends on the
number of rows only, and a captured step serves any mix of adapters. The programs read the
addresses, ranks and scales of the slots in `LoraTable.on_device`.

A mixture has an adapter's factors for each expert, and many more of these than a tile has rows. So
pairs of a token and an expert are sorted by slot and expert, as in experts.py, and a program has a
tile of rows of one slot and expert. An embedding needs no first product: it is a column of A. Whole
layers of adapters need one product each, with the tiles of the first product above.

A row's order of sums depends on its own adapter only. The number of inputs decides how K is cut
into splits. With few rows each split has a program of its own, and the second kernel adds the
splits' sums from first to last. With many rows one program computes all splits, and adds their sums
in the same order. The weights are the left operands, for the reason that gemm.py gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.lora import LINE, SLICE_WORDS, LoraTable, LoraWeight, affine_panels
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.sizes import lora_nbytes, lora_panels
from octavo.kernels.triton import gemm
from octavo.kernels.triton.experts import Pairs, find_tile
from octavo.kernels.triton.gemm import STEP

_SPLIT = 512
_MOST_SPLITS = 16
_FEW_ROWS = 256
_TILE_N = 64
_BLOCK = 1024

Table = LoraTable | ReplacedTable

Precision = Literal["ieee", "tf32x3"]


def best_precision(x: Tensor) -> Precision:
    """Return the precision of the product with B^T for inputs x.

    Numbers of 16 bits are exact in TF32, and two TF32 numbers add up to almost any float32 number.
    """
    if x.element_size() == 4 or not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] < 8:
        return "ieee"
    return "tf32x3"


@dataclass(slots=True)
class DeviceTable:
    """A table on the device.

    Attributes:
        slices: `LoraTable.slices` as int64 [slots, modules, words], or `ReplacedTable.addresses`
            as int64 [slots, 2].
        whole: memory of the slices of all tables that `put_tables` copies.
        tiles: of a `LoraTable`: module, first output, end of the module's outputs and first output
            of the module of each tile of outputs: int32 [tiles, 4].
    """

    slices: Tensor
    whole: Tensor
    tiles: Tensor | None = None


def put_tables(tables: Sequence[Table], device: torch.device) -> None:
    """Implement `Ops.put_adapter_tables`: one copy for all tables, in order with the steps."""
    if not tables:
        return
    arrays = [it.addresses if isinstance(it, ReplacedTable) else it.slices for it in tables]
    words = [torch.from_numpy(array.view(np.int64).reshape(-1)) for array in arrays]
    if tables[0].on_device is None:
        whole = torch.empty(sum(map(len, words)), dtype=torch.int64, device=device)
        for table, part in zip(tables, whole.split([len(part) for part in words]), strict=True):
            if isinstance(table, ReplacedTable):
                table.on_device = DeviceTable(part.view(table.addresses.shape), whole)
            else:
                slices = part.view(*table.slices.shape, SLICE_WORDS)
                table.on_device = DeviceTable(slices, whole, _tiles(table).to(device))
    first = tables[0].on_device
    assert isinstance(first, DeviceTable)
    _copy(torch.cat(words), first.whole)


def _copy(source: Tensor, to: Tensor) -> None:
    """Copy numbers of the host without waiting for the device."""
    to.copy_(source.pin_memory() if to.is_cuda else source, non_blocking=True)


def _tiles(table: LoraTable) -> Tensor:
    """Return `DeviceTable.tiles`; no tile has outputs of two modules."""
    modules = enumerate(pairwise(table.bounds.tolist()))
    rows = [(i, at, end, begin) for i, (begin, end) in modules for at in range(begin, end, _TILE_N)]
    return torch.tensor(rows, dtype=torch.int32)


def pack(
    a: Tensor,
    b: Tensor,
    scale: float,
    dtype: torch.dtype,
    out: Tensor | None,
    affine: Tensor | None,
    device: torch.device,
) -> LoraWeight:
    """Implement `Ops.pack_lora`.

    A stays as it is. B is transposed, and its outputs are padded to a multiple of 64. All parts
    begin at multiples of 16 bytes, and so do the rows of B.
    """
    (rank, k), n = a.shape, len(b)
    assert b.shape == (n, rank)
    name = str(dtype).removeprefix("torch.")
    nbytes = lora_nbytes(rank, n, k, name, affine=affine is not None)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device) if out is None else out
    assert memory.shape == (nbytes,)
    assert memory.data_ptr() % 16 == 0
    at, size = lora_panels(rank, n, k, name)
    end = at + size
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    first = packed[:at].view(dtype)[: rank * k].view(rank, k)
    second = packed[at:end].view(dtype).view(rank, -1)
    first.copy_(a)
    second[:, :n].copy_(b.T)
    panels = None
    if affine is not None:
        numbers = torch.from_numpy(affine_panels(affine.numpy()))
        packed[end:].view(torch.float32).view(numbers.shape).copy_(numbers)
        panels = memory[end:].view(torch.float32).view(numbers.shape)
    _copy(packed, memory)
    return LoraWeight(memory[:at], memory[at:end], rank, n, k, scale, panels)


def pack_replaced(
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    table: ReplacedTable,
    out: Tensor | None,
    device: torch.device,
) -> ReplacedWeight:
    """Implement `Ops.pack_replaced`: the weight stays as it is, [outputs, inputs]."""
    assert tuple(weight.shape) == table.shape
    assert (bias is not None) == table.has_bias
    name = str(dtype).removeprefix("torch.")
    nbytes = table.nbytes(name)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device) if out is None else out
    assert memory.shape == (nbytes,)
    assert memory.data_ptr() % 16 == 0
    packed = memory[: weight.numel() * dtype.itemsize].view(dtype).view(weight.shape)
    _copy(weight.to(dtype), packed)
    if bias is None:
        return ReplacedWeight(packed, None)
    begin = -(-table.sizes(name)[0] // LINE) * LINE
    own = memory[begin : begin + len(bias) * dtype.itemsize].view(dtype)
    _copy(bias.to(dtype), own)
    return ReplacedWeight(packed, own)


@triton.jit
def _find_rows(slots, slot, row, rows):
    """Return which of the rows have the slot, and the number of these rows."""
    mine = tl.load(slots + row, mask=row < rows, other=-1) == slot
    return mine, tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _find_pairs(bounds, tile_ends, order, groups, block, TILE_R: tl.constexpr):
    """Return the slot and expert of a tile of sorted pairs, its rows, and which of these exist."""
    slot, at, mine, _ = find_tile(bounds, tile_ends, groups, block, TILE_R)
    return slot, tl.load(order + at, mask=mine, other=0), mine


@triton.jit
def _load_matrix(word, like):
    """Return the pointer to the numbers at an address in the table."""
    pointer = tl.load(word).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize=["rows", "groups"])  # rows change from step to step
def _shrink(
    x,
    slots,
    bounds,
    tile_ends,
    groups,
    sources,
    slices,
    sums,
    rows,
    k,
    x_stride,
    width,
    modules,
    rank_tiles,
    splits,
    each,
    SORTED: tl.constexpr,
    UPCAST: tl.constexpr,
    APART: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute a tile of x A^T: float32 [splits or 1, rows, modules, rank tiles, TILE_RANK].

    `width` is the number of sums of a row, `each` that of inputs of a split. With SORTED, `slots`
    are the rows of sorted pairs, and `sources` the row of x of each row.
    """
    if SORTED:
        slot, row, mine = _find_pairs(bounds, tile_ends, slots, groups, tl.program_id(0), TILE_R)
        if slot >= groups:
            return
        source = tl.load(sources + row, mask=mine, other=0)
    else:
        slot = tl.program_id(2)
        row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
        mine, count = _find_rows(slots, slot, row, rows)
        if count == 0:
            return
        source = row
    first = 0
    part = tl.program_id(1)
    if APART:
        first = part % splits
        part = part // splits
    module = part // rank_tiles
    tile = part % rank_tiles
    entry = slices + (slot * modules + module) * WORDS
    rank = tl.load(entry + 3)
    if tile * TILE_RANK >= rank:
        return
    k_at = tl.arange(0, TILE_K)
    in_tile = tl.arange(0, TILE_RANK)
    rank_at = tile * TILE_RANK + in_tile
    rank_in = rank_at < rank
    a_at = _load_matrix(entry, x) + rank_at.to(tl.int64)[:, None] * k + k_at[None, :]
    x_at = x + source.to(tl.int64)[:, None] * x_stride + k_at[None, :]
    steps = tl.cdiv(k, TILE_K)
    each //= TILE_K
    total = tl.zeros([TILE_RANK, TILE_R], tl.float32)
    end_split = splits
    if APART:
        end_split = first + 1
    for split in range(first, end_split):
        begin = split * each
        end = tl.minimum(begin + each, steps)
        acc = tl.zeros([TILE_RANK, TILE_R], tl.float32)
        for step in range(begin, end):
            start = step * TILE_K
            if WHOLE:
                left = tl.load(a_at + start, mask=rank_in[:, None], other=0.0)
                right = tl.load(x_at + start, mask=mine[:, None], other=0.0)
            else:
                k_in = (start + k_at < k)[None, :]
                left = tl.load(a_at + start, mask=rank_in[:, None] & k_in, other=0.0)
                right = tl.load(x_at + start, mask=mine[:, None] & k_in, other=0.0)
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        total += acc
    sums += (row.to(tl.int64) + first * rows)[None, :] * width
    at = (module * rank_tiles + tile) * TILE_RANK + in_tile
    tl.store(sums + at[:, None], total, mask=mine[None, :])


@triton.jit(do_not_specialize=["rows", "groups", "parts"])  # rows and parts change
def _expand(
    x,
    sums,
    out,
    slots,
    bounds,
    tile_ends,
    groups,
    slices,
    tiles,
    num_tiles,
    rows,
    out_stride,
    width,
    modules,
    rank_tiles,
    parts,
    SORTED: tl.constexpr,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    """Add a tile of scale * sums B^T to `out`; then apply gains and offsets."""
    block = tl.program_id(0) // num_tiles
    if SORTED:
        slot, row, mine = _find_pairs(bounds, tile_ends, slots, groups, block, TILE_R)
        if slot >= groups:
            return
    else:
        slot = tl.program_id(1)
        row = block * TILE_R + tl.arange(0, TILE_R)
        mine, count = _find_rows(slots, slot, row, rows)
        if count == 0:
            return
    tile = tiles + (tl.program_id(0) % num_tiles) * 4
    module = tl.load(tile)
    entry = slices + (slot * modules + module) * WORDS
    rank = tl.load(entry + 3)
    if rank == 0:
        return
    n_at = tl.load(tile + 1) + tl.arange(0, TILE_N)
    end = tl.load(tile + 2)
    begin = tl.load(tile + 3)
    scale = tl.load(entry + 4).to(tl.int32).to(tl.float32, bitcast=True)
    outputs = tl.multiple_of(tl.cdiv(end - begin, 64) * 64, 64).to(tl.int64)  # as `pack` pads them
    in_tile = tl.arange(0, TILE_RANK)
    column = tl.multiple_of(tl.load(tile + 1) - begin, TILE_N) + tl.arange(0, TILE_N)
    b_at = _load_matrix(entry + 1, x) + in_tile[:, None] * outputs + column[None, :]
    u_at = sums + row.to(tl.int64)[None, :] * width + in_tile[:, None]
    u_at += module * rank_tiles * TILE_RANK
    split = rows.to(tl.int64) * width
    acc = tl.zeros([TILE_N, TILE_R], tl.float32)
    for start in range(0, rank.to(tl.int32), TILE_RANK):
        u = tl.zeros([TILE_RANK, TILE_R], tl.float32)
        for part in range(parts):
            u += tl.load(u_at + start + part * split, mask=mine[None, :], other=0.0)
        rank_in = (start + in_tile < rank)[:, None]
        b = tl.load(b_at + start * outputs, mask=rank_in, other=0.0).to(tl.float32)
        acc = tl.dot(tl.trans(b), u * scale, acc, input_precision=PRECISION)
    out_at = out + row.to(tl.int64)[:, None] * out_stride + n_at[None, :]
    mask = mine[:, None] & (n_at < end)[None, :]
    total = tl.load(out_at, mask=mask, other=0.0).to(tl.float32) + tl.trans(acc)
    affine = tl.load(entry + 2)
    if affine != 0:
        panel = affine.to(tl.pointer_type(tl.float32)) + 2 * column
        panel -= tl.arange(0, TILE_N)  # a panel has the gains of a tile, and then its offsets
        total = total * tl.load(panel)[None, :] + tl.load(panel + TILE_N)[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _columns(
    ids,
    slots,
    slices,
    sums,
    kept,
    like,
    vocab,
    width,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a token's column of its adapter's A, and zeros after it: float32 [rows, width].

    `kept` receives the slots, without those of tokens that are no columns.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.load(ids + row)
    if (token < 0) | (token >= vocab):
        slot = tl.full([], -1, tl.int32)
    tl.store(kept + row, slot)
    if slot < 0:
        return
    entry = slices + slot * WORDS
    rank = tl.arange(0, BLOCK)
    mask = rank < tl.load(entry + 3)
    matrix = _load_matrix(entry, like)
    column = tl.load(matrix + rank.to(tl.int64) * vocab + token, mask=mask, other=0.0)
    tl.store(sums + row * width + rank, column.to(tl.float32), mask=rank < width)


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _replace(
    x,
    out,
    slots,
    addresses,
    rows,
    n,
    k,
    x_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Set a tile of `out` to x W^T + b of the slot's layer."""
    slot = tl.program_id(1)
    tiles_n = tl.cdiv(n, TILE_N)
    row = (tl.program_id(0) // tiles_n) * TILE_R + tl.arange(0, TILE_R)
    mine, count = _find_rows(slots, slot, row, rows)
    if count == 0:
        return
    if tl.load(addresses + slot * 2) == 0:
        return
    weight = _load_matrix(addresses + slot * 2, x)
    n_at = ((tl.program_id(0) % tiles_n) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    n_in = n_at < n
    k_at = tl.arange(0, TILE_K)
    m_at = row.to(tl.int64)
    a_at = x + m_at[:, None] * x_stride + k_at[None, :]
    b_at = weight + n_at[:, None] * k + k_at[None, :]
    steps = tl.cdiv(k, TILE_K)
    acc = gemm.add_split(
        a_at, b_at, k_at, 0, steps, k, mine, n_in, UPCAST, WHOLE, TILE_R, TILE_N, TILE_K
    )
    if HAS_BIAS:
        bias = _load_matrix(addresses + slot * 2 + 1, x)
        acc += tl.load(bias + n_at, mask=n_in, other=0.0).to(tl.float32)[:, None]
    out_at = out + m_at[None, :] * out_stride + n_at[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=mine[None, :] & n_in[:, None])


@triton.jit
def _copy_rows(ids, slots, addresses, out, vocab, n, out_stride, BLOCK: tl.constexpr):
    """Set a part of a row of `out` to that of the token in the table of the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.load(ids + row)
    if (slot < 0) | (token < 0) | (token >= vocab):
        return
    if tl.load(addresses + slot * 2) == 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    numbers = tl.load(_load_matrix(addresses + slot * 2, out) + token * n + at, mask=mask)
    tl.store(out + row * out_stride + at, numbers, mask=mask)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of the first product's results of a layer."""

    modules: int
    tile_rank: int
    rank_tiles: int

    @classmethod
    def of(cls, table: LoraTable) -> _Shape:
        tile_rank = min(64, max(16, triton.next_power_of_2(table.max_rank)))
        modules = len(table.bounds) - 1
        return cls(modules, tile_rank, triton.cdiv(table.max_rank, tile_rank))

    @property
    def width(self) -> int:
        """Number of sums of a row."""
        return self.modules * self.rank_tiles * self.tile_rank


def _on_device(table: Table) -> DeviceTable:
    device = table.on_device
    assert isinstance(device, DeviceTable), "put_adapter_tables was not called"
    return device


def _tile_rows(rows: int, x: Tensor) -> int:
    """Return the rows of a tile."""
    return 16 if rows <= 16 or x.element_size() == 4 else 64


def add_lora(
    out: Tensor,
    x: Tensor,
    slots: Tensor,
    table: LoraTable,
    precision: Precision,
    *,
    upcast: bool,
) -> None:
    """Implement `Ops.add_lora`.

    Args:
        out: see `Ops.add_lora`, as the next ones.
        x: see there.
        slots: see there.
        table: see there.
        precision: precision of the second product, whose left operand has the type of x.
        upcast: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    assert len(x) == len(out)
    assert slots.dtype == torch.int32
    assert slots.is_contiguous()
    if len(out):
        add_pairs(out, x, slots, table, precision, upcast=upcast)


def add_expert_lora(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    places: Tensor,
    slots: Tensor,
    table: LoraTable,
    precision: Precision,
    *,
    of_tokens: bool,
    factors: Tensor | None,
    upcast: bool,
) -> None:
    """Implement `Ops.add_expert_lora`, without the activation.

    Args:
        out: see `Ops.add_expert_lora`, as the next ones.
        x: see there.
        ids: see there.
        places: see there.
        slots: see there.
        table: see there.
        precision: see `add_lora`.
        of_tokens: True if x has a row for each token; False: for each row of `out`.
        factors: see `Ops.add_expert_lora`.
        upcast: see `add_lora`.
    """
    if not len(out):
        return
    groups, top_k = len(table.slices), ids.shape[1]
    own = slots[:, None] * table.experts + ids
    # Pairs without an adapter come after those of all groups.
    found = Pairs.of(torch.where(slots[:, None] < 0, groups, own).int(), groups)
    rows = places.flatten().long()[found.order]
    sources = torch.arange(len(out), device=x.device)
    if of_tokens:
        tokens = found.order // top_k
        if factors is None:
            sources = torch.empty_like(sources).scatter_(0, rows, tokens)
        else:
            scaled = x.index_select(0, tokens).float() * factors.flatten()[found.order, None]
            x = torch.empty_like(scaled, dtype=x.dtype).index_copy_(0, rows, scaled.to(x.dtype))
    add_pairs(out, x, rows, table, precision, found, sources, upcast=upcast)


def add_pairs(
    out: Tensor,
    x: Tensor,
    slots: Tensor,
    table: LoraTable,
    precision: Precision,
    pairs: Pairs | None = None,
    sources: Tensor | None = None,
    *,
    upcast: bool,
) -> None:
    """Launch both products.

    Args:
        out: see `add_lora`, as the next ones.
        x: see there.
        slots: see there; with `pairs`, their rows of `out`, int64 [pairs].
        table: see there.
        precision: see there.
        pairs: pairs sorted by slot and expert; None: each row has a slot.
        sources: with `pairs`, the row of x of each row of `out`, int64 [pairs].
        upcast: see there.
    """
    rows, k, device, shape = len(out), x.shape[1], _on_device(table), _Shape.of(table)
    assert k == table.inputs
    assert out.stride(1) == x.stride(1) == 1
    num_slots = len(device.slices)
    splits = min(_MOST_SPLITS, triton.cdiv(k, _SPLIT))
    apart = rows <= _FEW_ROWS and splits > 1
    parts = splits if apart else 1
    tile_r = _tile_rows(rows if pairs is None else -(-rows // num_slots), x)
    tile_k = 64 if x.element_size() == 4 else 128
    blocks = triton.cdiv(rows, tile_r) if pairs is None else pairs.most_tiles(tile_r)
    sums = torch.empty(parts, rows, shape.width, device=x.device)
    _shrink[(blocks, shape.modules * shape.rank_tiles * parts, 1 if pairs else num_slots)](
        x,
        slots,
        slots if pairs is None else pairs.bounds,
        slots if pairs is None else pairs.tile_ends(tile_r),
        num_slots,
        slots if sources is None else sources,
        device.slices,
        sums,
        rows,
        k,
        x.stride(0),
        shape.width,
        shape.modules,
        shape.rank_tiles,
        splits,
        triton.cdiv(triton.cdiv(k, STEP), splits) * STEP,
        SORTED=pairs is not None,
        UPCAST=upcast,
        APART=apart,
        WHOLE=k % tile_k == 0,
        WORDS=SLICE_WORDS,
        TILE_R=tile_r,
        TILE_RANK=shape.tile_rank,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=3,
    )
    _add_product(out, x, sums, slots, table, precision, tile_r, pairs)


def _add_product(
    out: Tensor,
    x: Tensor,
    sums: Tensor,
    slots: Tensor,
    table: LoraTable,
    precision: Precision,
    tile_r: int,
    pairs: Pairs | None = None,
) -> None:
    """Launch the second product; the arguments are those of `add_pairs` and `_expand`."""
    device, shape = _on_device(table), _Shape.of(table)
    tiles, num_slots = device.tiles, len(device.slices)
    assert tiles is not None
    assert out.shape == (sums.shape[1], table.bounds[-1])
    assert out.stride(1) == 1
    blocks = triton.cdiv(len(out), tile_r) if pairs is None else pairs.most_tiles(tile_r)
    _expand[(blocks * len(tiles), 1 if pairs else num_slots)](
        x,
        sums,
        out,
        slots,
        slots if pairs is None else pairs.bounds,
        slots if pairs is None else pairs.tile_ends(tile_r),
        num_slots,
        device.slices,
        tiles,
        len(tiles),
        len(out),
        out.stride(0),
        shape.width,
        shape.modules,
        shape.rank_tiles,
        len(sums),
        SORTED=pairs is not None,
        PRECISION=precision,
        WORDS=SLICE_WORDS,
        TILE_R=tile_r,
        TILE_N=_TILE_N,
        TILE_RANK=shape.tile_rank,
        num_warps=4,
        num_stages=2,
    )


def add_lora_embedding(
    out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable, precision: Precision
) -> None:
    """Implement `Ops.add_lora_embedding`; `precision` is as in `add_lora`."""
    rows, shape = len(out), _Shape.of(table)
    assert ids.is_contiguous()
    assert slots.is_contiguous()
    if not rows:
        return
    sums = torch.empty(1, rows, shape.width, device=out.device)
    kept = torch.empty_like(slots)
    _columns[(rows,)](
        ids,
        slots,
        _on_device(table).slices,
        sums,
        kept,
        out,
        table.inputs,
        shape.width,
        WORDS=SLICE_WORDS,
        BLOCK=triton.next_power_of_2(shape.width),
    )
    _add_product(out, out, sums, kept, table, precision, _tile_rows(rows, out))


def replace_linear(
    out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable, *, upcast: bool
) -> None:
    """Implement `Ops.replace_linear`; `upcast` is as in `add_lora`."""
    rows, (n, k) = len(x), table.shape
    assert x.shape[1] == k
    assert out.shape == (rows, n)
    assert out.stride(1) == x.stride(1) == 1
    assert slots.is_contiguous()
    if not rows:
        return
    tile_r, tile_k = _tile_rows(rows, x), 64 if x.element_size() == 4 else 128
    grid = triton.cdiv(rows, tile_r) * triton.cdiv(n, _TILE_N), len(table.addresses)
    _replace[grid](
        x,
        out,
        slots,
        _on_device(table).slices,
        rows,
        n,
        k,
        x.stride(0),
        out.stride(0),
        HAS_BIAS=table.has_bias,
        UPCAST=upcast,
        WHOLE=k % tile_k == 0,
        TILE_R=tile_r,
        TILE_N=_TILE_N,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=3,
    )


def replace_embedding(out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable) -> None:
    """Implement `Ops.replace_embedding`."""
    (vocab, n), rows = table.shape, len(out)
    assert out.shape == (rows, n)
    assert out.stride(1) == 1
    assert ids.is_contiguous()
    assert slots.is_contiguous()
    if rows:
        _copy_rows[(rows, triton.cdiv(n, _BLOCK))](
            ids, slots, _on_device(table).slices, out, vocab, n, out.stride(0), BLOCK=_BLOCK
        )
