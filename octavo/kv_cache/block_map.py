"""Map of the KV cache for the engine view: the state of every block and of every recurrent state.

Above `MAX_CELLS` blocks, a cell stands for several neighbouring blocks.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.states import StateManager

INTERVAL = 0.2
"""Least time between two maps, or two ticks of the engine view, in seconds."""
REST = 300
"""Time between two maps, or two ticks, in multiples of the processor time for one."""
MAX_CELLS = 4096
AGES = 8
"""Number of ages: 0 is for the eighth that is reused last, 7 for the one that is reused next."""
MOST = 7
"""Largest value of a share or a number of references in a cell."""
OWNER_SHIFT = 12
"""Place of the owner in a cell: the bits from 12 on are 1 + its index in `owners`, 0: no owner."""


class BlockMap(msgspec.Struct):
    """State of the KV cache.

    A cell of blocks has, from the lowest bit on, 3 bits each: the age of its free blocks with a
    known prefix; the shares of blocks with a known prefix, and of blocks in use, 0 to `MOST` of all
    its blocks; the references to its most shared block, at most `MOST`. Then the owner of its first
    block in use.

    A cell of a recurrent state has 3 bits for the age of a snapshot, 3 bits for the `SlotKind`, and
    the owner in the same place.
    """

    num_blocks: int
    """Number of blocks that requests can use. Cell i begins with block 1 + i * blocks_per_cell."""
    blocks_per_cell: int
    cells: bytes
    """Cells of the blocks, uint32, little-endian."""
    states: bytes
    """Cells of the recurrent states, uint32, little-endian; empty without any."""
    owners: list[str]
    """Ids of the requests that hold blocks or states."""
    seconds: float = 0.0
    """Processor time to make the map."""

    def pack(self) -> bytes:
        """Return the map for a recording, compressed to about a tenth."""
        return zlib.compress(msgspec.msgpack.encode(self), level=1)

    @classmethod
    def unpack(cls, data: bytes) -> BlockMap:
        """Return the map of `pack`."""
        return msgspec.msgpack.decode(zlib.decompress(data), type=cls)


def make_block_map(manager: KVCacheManager, max_cells: int = MAX_CELLS) -> BlockMap:
    """Return the map of a KV cache between two steps. O(blocks in use, or with a known prefix)."""
    begin = time.thread_time()
    held = manager.held_blocks()
    owners = list(held)
    pool, states = manager.pool, manager.states
    owner_of = np.zeros(len(pool.blocks), np.uint32)
    refs = np.zeros(len(pool.blocks), np.uint32)
    for index in range(len(owners) - 1, -1, -1):  # the first owner of a shared block is shown
        ids = np.array(held[owners[index]], np.intp)
        owner_of[ids] = index + 1
        refs[ids] += 1  # a request holds a block once, except for the null block
    per_cell = -(-pool.num_usable_blocks // max_cells)
    cells = _cells(pool, owner_of[1:], refs[1:], per_cell)
    slots = np.zeros(0, np.uint32) if states is None else _state_cells(states, owners)
    return BlockMap(
        pool.num_usable_blocks,
        per_cell,
        cells.astype("<u4").tobytes(),
        slots.astype("<u4").tobytes(),
        owners,
        time.thread_time() - begin,
    )


def _cells(
    pool: BlockPool, owner_of: NDArray[np.uint32], refs: NDArray[np.uint32], per_cell: int
) -> NDArray[np.uint32]:
    """Return the cells of all blocks but the null block.

    Args:
        pool: the pool.
        owner_of: 1 + index of the owner of each block; 0 without one.
        refs: number of references to each block.
        per_cell: number of blocks of a cell.
    """
    count = -(-len(refs) // per_cell)
    sizes = np.full(count, per_cell)
    sizes[-1] -= count * per_cell - len(refs)

    def number(blocks: NDArray[np.intp], weights: NDArray[np.intp] | None = None) -> NDArray[Any]:
        return np.bincount(blocks // per_cell, weights, count)

    used = np.flatnonzero(refs)
    known = np.array(pool.known_blocks(), np.intp) - 1
    num_free = int((refs[known] == 0).sum())
    free = np.array(pool.free_queue.last_known(num_free), np.intp) - 1
    ages = number(free, np.arange(num_free) * AGES // max(1, num_free))
    cells: NDArray[np.uint32] = (ages // np.maximum(1, number(free))).astype(np.uint32)
    for shift, blocks in ((3, known), (6, used)):
        cells |= (-(-MOST * number(blocks) // sizes)).astype(np.uint32) << shift
    most, first = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    np.maximum.at(most, used // per_cell, refs[used])
    shown, places = np.unique(used // per_cell, return_index=True)
    first[shown] = owner_of[used[places]]
    cells |= np.minimum(most, MOST) << 9
    cells |= first << OWNER_SHIFT
    return cells


def _state_cells(states: StateManager, owners: list[str]) -> NDArray[np.uint32]:
    """Return the cells of the slots; add their owners without blocks to `owners`."""
    index_of = {owner: index for index, owner in enumerate(owners)}
    cells = np.zeros(states.num_slots, np.uint32)
    for slot, (kind, owner) in states.slots().items():
        cells[slot] = kind << 3
        if owner is not None:
            if owner not in index_of:
                index_of[owner] = len(owners)
                owners.append(owner)
            cells[slot] |= index_of[owner] + 1 << OWNER_SHIFT
    ranked = states.ranked_slots()
    for rank, slot in enumerate(ranked):
        cells[slot] |= rank * AGES // len(ranked)
    return cells
