"""Changes of LoRA adapters to the results of a linear layer, for rows of many adapters in one call.

The two products of Punica (Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023), x A^T and then
its product with B^T, are a kernel each. A program has a tile of rows and a slot. It computes the
rows of the tile that have this slot, and ends at once if there are none. So the grid depends on the
number of rows only, and a captured step serves any mix of adapters. The programs read the
addresses, ranks and scales of the slots in `LoraTable.on_device`.

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

from octavo.kernels.lora import SLICE_WORDS, LoraTable, LoraWeight
from octavo.kernels.sizes import lora_nbytes, lora_panels
from octavo.kernels.triton.gemm import STEP

_SPLIT = 512
_MOST_SPLITS = 16
_FEW_ROWS = 256
_TILE_N = 64


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
    """A `LoraTable` on the device.

    Attributes:
        slices: `LoraTable.slices` as int64 [slots, modules, words].
        tiles: module, first output, end of the module's outputs and first output of the module of
            each tile of outputs: int32 [tiles, 4].
        whole: memory of the slices of all tables that `put_tables` copies.
    """

    slices: Tensor
    tiles: Tensor
    whole: Tensor


def put_tables(tables: Sequence[LoraTable], device: torch.device) -> None:
    """Implement `Ops.put_lora_tables`: one copy for all tables, in order with the steps."""
    words = [torch.from_numpy(table.slices.view(np.int64).reshape(-1)) for table in tables]
    if tables[0].on_device is None:
        whole = torch.empty(sum(map(len, words)), dtype=torch.int64, device=device)
        for table, part in zip(tables, whole.split([len(part) for part in words]), strict=True):
            slices = part.view(*table.slices.shape, SLICE_WORDS)
            table.on_device = DeviceTable(slices, _tiles(table).to(device), whole)
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
    a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, out: Tensor | None, device: torch.device
) -> LoraWeight:
    """Implement `Ops.pack_lora`.

    A stays as it is. B is transposed, and its outputs are padded to a multiple of 64. Both begin at
    multiples of 16 bytes, and so do the rows of B.
    """
    (rank, k), n = a.shape, len(b)
    assert b.shape == (n, rank)
    name = str(dtype).removeprefix("torch.")
    nbytes = lora_nbytes(rank, n, k, name)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device) if out is None else out
    assert memory.shape == (nbytes,)
    assert memory.data_ptr() % 16 == 0
    at, _ = lora_panels(rank, n, k, name)
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    first = packed[:at].view(dtype)[: rank * k].view(rank, k)
    second = packed[at:].view(dtype).view(rank, -1)
    first.copy_(a)
    second[:, :n].copy_(b.T)
    _copy(packed, memory)
    return LoraWeight(memory[:at], memory[at:], rank, n, k, scale)


@triton.jit
def _find_rows(slots, slot, row, rows):
    """Return which of the rows have the slot, and the number of these rows."""
    mine = tl.load(slots + row, mask=row < rows, other=-1) == slot
    return mine, tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _load_matrix(word, like):
    """Return the pointer to the numbers at an address in the table."""
    pointer = tl.load(word).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize=["rows"])  # they change from step to step
def _shrink(
    x,
    slots,
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
    UPCAST: tl.constexpr,
    APART: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute a tile of x A^T: float32 [splits or 1, rows, modules, rank tiles, TILE_RANK].

    `width` is the number of sums of a row, `each` that of inputs of a split.
    """
    slot = tl.program_id(2)
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    mine, count = _find_rows(slots, slot, row, rows)
    if count == 0:
        return
    first = 0
    part = tl.program_id(1)
    if APART:
        first = part % splits
        part = part // splits
    module = part // rank_tiles
    tile = part % rank_tiles
    entry = slices + (slot * modules + module) * WORDS
    rank = tl.load(entry + 2)
    if tile * TILE_RANK >= rank:
        return
    k_at = tl.arange(0, TILE_K)
    in_tile = tl.arange(0, TILE_RANK)
    rank_at = tile * TILE_RANK + in_tile
    rank_in = rank_at < rank
    a_at = _load_matrix(entry, x) + rank_at.to(tl.int64)[:, None] * k + k_at[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k_at[None, :]
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


@triton.jit(do_not_specialize=["rows", "parts"])  # they change from step to step
def _expand(
    x,
    sums,
    out,
    slots,
    slices,
    tiles,
    num_tiles,
    rows,
    out_stride,
    width,
    modules,
    rank_tiles,
    parts,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    """Add a tile of scale * sums B^T to `out`."""
    slot = tl.program_id(1)
    row = (tl.program_id(0) // num_tiles) * TILE_R + tl.arange(0, TILE_R)
    mine, count = _find_rows(slots, slot, row, rows)
    if count == 0:
        return
    tile = tiles + (tl.program_id(0) % num_tiles) * 4
    module = tl.load(tile)
    entry = slices + (slot * modules + module) * WORDS
    rank = tl.load(entry + 2)
    if rank == 0:
        return
    n_at = tl.load(tile + 1) + tl.arange(0, TILE_N)
    end = tl.load(tile + 2)
    begin = tl.load(tile + 3)
    scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
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
    old = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, (old + tl.trans(acc)).to(out.dtype.element_ty), mask=mask)


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
    rows, k = x.shape
    device = table.on_device
    assert isinstance(device, DeviceTable), "put_lora_tables was not called"
    assert k == table.inputs
    assert out.shape == (rows, table.bounds[-1])
    assert out.stride(1) == x.stride(1) == 1
    assert slots.dtype == torch.int32
    assert slots.is_contiguous()
    if not rows:
        return
    num_slots, modules, _ = device.slices.shape
    tile_rank = min(64, max(16, triton.next_power_of_2(table.max_rank)))
    rank_tiles = triton.cdiv(table.max_rank, tile_rank)
    splits = min(_MOST_SPLITS, triton.cdiv(k, _SPLIT))
    few = rows <= _FEW_ROWS
    apart = few and splits > 1
    parts = splits if apart else 1
    tile_r = 16 if rows <= 16 or x.element_size() == 4 else 64
    tile_k = 64 if x.element_size() == 4 else 128
    blocks = triton.cdiv(rows, tile_r)
    width = modules * rank_tiles * tile_rank
    sums = torch.empty(parts, rows, width, device=x.device)
    _shrink[(blocks, modules * rank_tiles * parts, num_slots)](
        x,
        slots,
        device.slices,
        sums,
        rows,
        k,
        x.stride(0),
        width,
        modules,
        rank_tiles,
        splits,
        triton.cdiv(triton.cdiv(k, STEP), splits) * STEP,
        UPCAST=upcast,
        APART=apart,
        WHOLE=k % tile_k == 0,
        WORDS=SLICE_WORDS,
        TILE_R=tile_r,
        TILE_RANK=tile_rank,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=3,
    )
    _expand[(blocks * len(device.tiles), num_slots)](
        x,
        sums,
        out,
        slots,
        device.slices,
        device.tiles,
        len(device.tiles),
        rows,
        out.stride(0),
        width,
        modules,
        rank_tiles,
        parts,
        PRECISION=precision,
        WORDS=SLICE_WORDS,
        TILE_R=tile_r,
        TILE_N=_TILE_N,
        TILE_RANK=tile_rank,
        num_warps=4,
        num_stages=2,
    )
