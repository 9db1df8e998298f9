"""Copies of blocks of a rank's KV cache, page by page."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.kv_cache.states import slot_of_state
from octavo.kv_connector.layout import SUM_NBYTES, KVLayout, KVPart

Addresses = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # spreads the seeds of pages


class BlockCopy(NamedTuple):
    """Block, or piece of a state, and the address of its copy."""

    group_id: int
    block_id: int
    """Id of the block, or `id_of_state`."""
    address: int
    """Address of `KVLayout.copy_nbytes` bytes."""
    block_hash: bytes
    """Hash of the block. The checksums depend on it, so another block's copy fails the check."""


class KVCaches:
    """KV cache of a rank.

    Args:
        layout: layout of a block.
        tensors: addresses of the physical tensors [num_blocks, 2, heads, ...], then of those with
            recurrent states [num_states, row_nbytes].
        num_blocks: number of blocks in each tensor.
    """

    def __init__(self, layout: KVLayout, tensors: Sequence[int], num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensors = np.array(tensors, np.uint64)

    def touch(self, num_blocks: int) -> Iterator[None]:
        """Make the system allocate the memory of the first blocks, one tensor per iteration."""
        num_blocks = min(num_blocks, self.num_blocks)
        paged = self.tensors[: len(self.layout.row_nbytes)]
        for tensor, nbytes in zip(paged, self.layout.row_nbytes, strict=True):
            _native.touch_pages(int(tensor), nbytes * num_blocks)
            yield

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, with checksums."""
        saving = self.saving(copies)
        for layer in range(saving.num_layers):
            saving.save_layer(layer)

    def saving(self, copies: Sequence[BlockCopy]) -> LayerSaves:
        """Return an object that copies blocks layer by layer."""
        by_layer: dict[int, list[_Pages]] = defaultdict(list)
        blocks, pieces = self._divide(copies)
        for group_id, some in blocks.items():
            pages = self._pages(group_id, some, self.layout.part)
            for i, layer in enumerate(self.layout.groups[group_id].layer_indices):
                by_layer[layer].append(pages.of_sides(2 * i, 2 * i + 2))
        for layer, pages, _ in self._state_pages(pieces):
            by_layer[layer].append(replace(pages, is_state=True))
        return LayerSaves(by_layer)

    def load(self, copies: Sequence[BlockCopy], part: KVPart | None = None) -> set[int]:
        """Restore blocks and states; return the ids of those whose copies are damaged.

        Args:
            copies: the copies.
            part: part of a block that is in the copies; None: this rank's. The rest of the blocks
                is not changed. Copies of states are this rank's.
        """
        damaged: set[int] = set()
        blocks, pieces = self._divide(copies)
        for group_id, some in blocks.items():
            of_block = self._pages(group_id, some, part or self.layout.part).load().any(axis=1)
            damaged.update(some[i].block_id for i in np.flatnonzero(of_block))
        for _, pages, ids in self._state_pages(pieces):
            damaged.update(ids[i] for i in np.flatnonzero(pages.load()))
        return damaged

    def _divide(
        self, copies: Sequence[BlockCopy]
    ) -> tuple[dict[int, list[BlockCopy]], list[BlockCopy]]:
        """Return the copies of blocks by group, and those of pieces of states."""
        blocks: dict[int, list[BlockCopy]] = defaultdict(list)
        pieces: list[BlockCopy] = []
        for copy in copies:
            is_block = copy.group_id < len(self.layout.groups)
            (blocks[copy.group_id] if is_block else pieces).append(copy)
        return blocks, pieces

    def _state_pages(self, pieces: Sequence[BlockCopy]) -> Iterator[tuple[int, _Pages, list[int]]]:
        """Yield (layer, pages, id of each page's state): slices of equal size at a time."""
        layout = self.layout
        alike: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = defaultdict(list)
        for copy in pieces:
            seed = int.from_bytes(copy.block_hash[:8], "little")
            sums = copy.address + layout.sums_offset
            for i, part in enumerate(layout.pieces[copy.group_id - len(layout.groups)]):
                here = int(self.tensors[part.tensor]) + part.begin
                here += slot_of_state(copy.block_id) * part.row_nbytes
                spread = (2 * (layout.first_layer + part.layer) + 1) * int(_SPREAD) + part.begin
                alike[part.layer, part.nbytes].append(
                    (
                        *(here, copy.address + part.offset, sums + i * SUM_NBYTES),
                        *((seed + spread) % 2**64, copy.block_id),
                    )
                )
        for (layer, nbytes), rows in alike.items():
            *columns, ids = zip(*rows, strict=True)
            arrays = [np.array(column, np.uint64) for column in columns]
            yield layer, _Pages(arrays[0], arrays[1], arrays[2], arrays[3], 1, nbytes), list(ids)

    def _pages(self, group_id: int, copies: Sequence[BlockCopy], part: KVPart) -> _Pages:
        """Return the pages of copied blocks: for each layer the keys, then the values."""
        own, size = self.layout.part, self.layout.page_nbytes[group_id]
        blocks = np.array([copy.block_id for copy in copies], np.uint64)[:, None]
        assert blocks.size == 0 or int(blocks.max()) < self.num_blocks
        starts = np.array([copy.address for copy in copies], np.uint64)[:, None]
        hashes = np.array(
            [int.from_bytes(copy.block_hash[:8], "little") for copy in copies], np.uint64
        )[:, None]
        layers = [layer for layer in own.layers[group_id] if layer in part.layers[group_id]]
        chunk, heads = own.chunk_nbytes[group_id], part.num_heads[group_id]
        first_here, first_there = own.first_heads[group_id], part.first_heads[group_id]
        begin = max(first_here, first_there)
        end = min(first_here + own.num_heads[group_id], first_there + heads)
        sides = np.tile(np.arange(2, dtype=np.uint64), len(layers))
        tensors = np.array([own.layers[group_id].index(layer) for layer in layers], np.int64)
        here = self.tensors[tensors].repeat(2) + sides * size + (begin - first_here) * chunk
        rows = np.array(self.layout.row_nbytes, np.uint64)[tensors].repeat(2)
        places = np.array([part.layers[group_id].index(layer) for layer in layers], np.uint64)
        numbers = (2 * places).repeat(2) + sides
        first = begin - first_there
        sums = part.sums_offset + (numbers * heads + first) * SUM_NBYTES
        seeds = (2 * np.array(layers, np.uint64)).repeat(2) + sides + 1
        return _Pages(
            here=_addresses(here + blocks * rows),
            there=_addresses(starts + (numbers * heads + first) * chunk),
            sums=_addresses(starts + sums),
            seeds=_addresses(hashes + seeds * _SPREAD + begin),
            chunks=max(0, end - begin),
            chunk_nbytes=chunk,
        )


@dataclass(frozen=True)
class _Pages:
    """Addresses of pages, of any shape such as [blocks, sides]; other arguments of copying."""

    here: Addresses
    """Addresses in the KV cache."""
    there: Addresses
    """Addresses in copies."""
    sums: Addresses
    seeds: Addresses
    chunks: int
    chunk_nbytes: int
    is_state: bool = False
    """True if they are float32 numbers of states, [pages]."""

    def without_nan(self) -> _Pages:
        """Return the pages of states without those that contain NaN.

        The others get the checksum 0, which no copy has, so that loading them fails.
        """
        count = self.chunk_nbytes // 4
        places = [(ctypes.c_float * count).from_address(int(start)) for start in self.here]
        bad = np.array([np.isnan(np.ctypeslib.as_array(place).min()) for place in places])
        if not bad.any():
            return self
        for address in self.sums[bad]:
            ctypes.memset(int(address), 0, SUM_NBYTES)
        return replace(
            self,
            here=_addresses(self.here[~bad]),
            there=_addresses(self.there[~bad]),
            sums=_addresses(self.sums[~bad]),
            seeds=_addresses(self.seeds[~bad]),
        )

    def of_sides(self, begin: int, end: int) -> _Pages:
        """Return a range of the pages of each block."""
        return replace(
            self,
            here=_addresses(self.here[:, begin:end]),
            there=_addresses(self.there[:, begin:end]),
            sums=_addresses(self.sums[:, begin:end]),
            seeds=_addresses(self.seeds[:, begin:end]),
        )

    def load(self) -> Bytes:
        """Copy the pages to the KV cache; return 1 for each damaged one, 0 for the others."""
        bad = np.zeros(self.here.shape, np.uint8)
        _native.load_pages(
            from_=self.there.ctypes.data,
            to=self.here.ctypes.data,
            bad=bad.ctypes.data,
            **self.others(),
        )
        return bad

    def others(self) -> dict[str, int]:
        """Return the arguments of the native functions other than the two addresses."""
        return {
            "sums": self.sums.ctypes.data,
            "seeds": self.seeds.ctypes.data,
            "pages": self.here.size,
            "chunks": self.chunks,
            "chunk_nbytes": self.chunk_nbytes,
        }


class LayerSaves:
    """Copying of blocks, layer by layer."""

    def __init__(self, by_layer: Mapping[int, Sequence[_Pages]]) -> None:
        self._by_layer = by_layer

    @property
    def num_layers(self) -> int:
        """Number of layers of the rank, up to the last one with pages to copy."""
        return max(self._by_layer, default=-1) + 1

    def save_layer(self, layer: int) -> None:
        """Copy the pages of a layer of the rank, with checksums; no state with NaN."""
        for pages in self._by_layer.get(layer, ()):
            if pages.is_state:
                pages = pages.without_nan()
            _native.save_pages(
                from_=pages.here.ctypes.data, to=pages.there.ctypes.data, **pages.others()
            )


def _addresses(array: Addresses) -> Addresses:
    return np.ascontiguousarray(array, np.uint64)
