"""Blocks of a rank's KV cache as pages in memory, copied to images of them and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.kv_connector.layout import SUM_NBYTES, KVLayout

Addresses = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # so that the seeds of pages lie far apart


class BlockImage(NamedTuple):
    """A block, and where its image is."""

    group_id: int
    block_id: int
    address: int
    """Of `KVLayout.image_nbytes` bytes."""
    block_hash: bytes
    """Of which the checksums depend: those of another block are never right."""


class KVCaches:
    """The KV cache of a rank.

    Args:
        layout: what its blocks are made of.
        tensors: addresses of the physical tensors [num_blocks, 2, heads, ...].
        num_blocks: blocks in each of them.
    """

    def __init__(self, layout: KVLayout, tensors: Sequence[int], num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensors = np.array(tensors, np.uint64)

    def save(self, images: Sequence[BlockImage]) -> None:
        """Copies blocks to their images, checksums included."""
        for group_id, some in _by_group(images).items():
            pages, places, sums, seeds = self._addresses(group_id, some)
            _native.save_pages(
                from_=pages.ctypes.data,
                to=places.ctypes.data,
                sums=sums.ctypes.data,
                seeds=seeds.ctypes.data,
                **self._sizes(group_id, len(pages)),
            )

    def load(self, images: Sequence[BlockImage]) -> set[int]:
        """Copies images to their blocks; returns those blocks whose images are damaged."""
        damaged: set[int] = set()
        for group_id, some in _by_group(images).items():
            pages, places, sums, seeds = self._addresses(group_id, some)
            bad = np.zeros(len(pages), np.uint8)
            _native.load_pages(
                from_=places.ctypes.data,
                to=pages.ctypes.data,
                sums=sums.ctypes.data,
                seeds=seeds.ctypes.data,
                bad=bad.ctypes.data,
                **self._sizes(group_id, len(pages)),
            )
            of_block = bad.reshape(len(some), -1).any(axis=1)
            damaged.update(some[i].block_id for i in np.flatnonzero(of_block))
        return damaged

    def _sizes(self, group_id: int, pages: int) -> dict[str, int]:
        layout = self.layout
        chunks = layout.num_chunks[group_id]
        return {
            "pages": pages,
            "chunks": chunks,
            "chunk_nbytes": layout.page_nbytes // chunks,
        }

    def _addresses(
        self, group_id: int, images: Sequence[BlockImage]
    ) -> tuple[Addresses, Addresses, Addresses, Addresses]:
        """Of each page of each block: its address, that in the image, of its sums; its seed."""
        layout = self.layout
        num_pages, chunks = layout.num_pages[group_id], layout.num_chunks[group_id]
        size = layout.page_nbytes
        blocks = np.array([image.block_id for image in images], np.uint64)
        assert blocks.size == 0 or int(blocks.max()) < self.num_blocks
        starts = np.array([image.address for image in images], np.uint64)
        hashes = np.array(
            [int.from_bytes(image.block_hash[:8], "little") for image in images], np.uint64
        )
        number = np.arange(num_pages, dtype=np.uint64)
        # Layer by layer the block's keys, then its values: as they lie in a tensor.
        of_layer = self.tensors[: num_pages // 2].repeat(2) + number % 2 * size
        pages = blocks[:, None] * (2 * size) + of_layer
        places = starts[:, None] + number * size
        sums = starts[:, None] + layout.sums_offset + number * (chunks * SUM_NBYTES)
        seeds = hashes[:, None] + (number + layout.rank * 2**32 + 1) * _SPREAD
        flat = (np.ascontiguousarray(a, np.uint64).reshape(-1) for a in (pages, places, sums))
        pages, places, sums = flat
        return pages, places, sums, np.ascontiguousarray(seeds, np.uint64).reshape(-1)


def _by_group(images: Sequence[BlockImage]) -> dict[int, list[BlockImage]]:
    groups: dict[int, list[BlockImage]] = {}
    for image in images:
        groups.setdefault(image.group_id, []).append(image)
    return groups
