"""Layout of a block of the KV cache, for connectors that copy it. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec

import octavo
from octavo.errors import ConfigError
from octavo.kv_cache.groups import KVCacheGroup, make_manager
from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager
from octavo.models.cache import Pages

SUM_NBYTES = 8
_LINE = 64
_VERSION = 1


class KVPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a model's blocks that is in a rank's copies, and the offsets in a copy."""

    layers: list[list[int]]
    """Of each group: its layers, by their numbers in the model."""
    first_head: int
    num_heads: list[int]
    """Of each group."""
    chunk_nbytes: list[int]
    """Of each group: bytes of a head's keys, or values, of a block."""
    sums_offset: int
    copy_nbytes: int = msgspec.field(name="image_nbytes")
    """Its name in files of earlier versions stays."""

    def cells(self) -> set[tuple[int, int, int]]:
        """(group, layer, head) of all that is in it."""
        return {
            (group_id, layer, self.first_head + head)
            for group_id, layers in enumerate(self.layers)
            for layer in layers
            for head in range(self.num_heads[group_id])
        }


@dataclass(frozen=True)
class KVLayout:
    """What a block holds on one rank, and all that its bytes depend on.

    A block of a group has a page for each layer's keys and one for its values, and a page a chunk
    for each head: that is what checksums are of. A copy of a block is its pages in the order of
    the layers, then the checksums.
    """

    model: str
    """Which model it is, and in which form (`model_hash`, dtype, quantization ...)."""
    block_size: int
    dtype: str
    """Of the KV cache, as `CacheSpec` names it."""
    groups: tuple[KVCacheGroup, ...]
    """With the layers and heads of this rank."""
    first_layer: int = 0
    """The number of the groups' layer 0 in the model."""
    first_head: int = 0
    """The number of this rank's first head of keys."""
    rank: int = 0
    world_size: int = 1
    """How many processes have a part of each block."""
    sums_in_parts: bool = False
    """Whether ranks sum up parts of a number (tensor_parallel_mode=reduce)."""

    @cached_property
    def identity(self) -> bytes:
        """32 bytes that differ where a block of the same tokens might hold other bytes.

        How processes divide the model is not in it, unless its numbers depend on that.
        """
        from octavo import _native  # plans are made without it

        divided = self.world_size if self.sums_in_parts else 0
        parts = (octavo.__version__, _VERSION, _native.isa(), self.model, self.block_size)
        text = "\0".join(map(str, (*parts, self.dtype, divided)))
        return hashlib.sha256(b"octavo-kv-layout:" + text.encode()).digest()

    @cached_property
    def part(self) -> KVPart:
        """Part of the blocks that is in this rank's copies."""
        return KVPart(
            layers=[[self.first_layer + i for i in group.layer_indices] for group in self.groups],
            first_head=self.first_head,
            num_heads=self.num_chunks,
            chunk_nbytes=[self.page_nbytes // chunks for chunks in self.num_chunks],
            sums_offset=self.sums_offset,
            copy_nbytes=self.copy_nbytes,
        )

    @cached_property
    def managers(self) -> list[SingleTypeKVCacheManager]:
        """Each group's rules."""
        return [make_manager(group.cache, self.block_size) for group in self.groups]

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of a page of a layer: the same in all groups.

        Raises:
            ConfigError: it is not the same, or a kind of cache cannot be kept.
        """
        sizes = {
            group.cache.block_nbytes(self.block_size, self.dtype) // pages.count
            for group, pages in zip(self.groups, self.pages, strict=True)
        }
        if len(sizes) > 1:
            raise ConfigError(
                "kv_transfer_config is not supported with models whose layers cache blocks of "
                "different sizes; leave it out."
            )
        return sizes.pop()

    @cached_property
    def pages(self) -> list[Pages]:
        """The pieces of a block of each group."""
        return [group.cache.pages() for group in self.groups]

    @cached_property
    def num_chunks(self) -> list[int]:
        """Of each group: chunks of a page."""
        return [pages.chunks for pages in self.pages]

    @cached_property
    def num_pages(self) -> list[int]:
        """Of each group: pages of a block."""
        pairs = zip(self.groups, self.pages, strict=True)
        return [pages.count * len(group.layer_indices) for group, pages in pairs]

    @cached_property
    def sums_offset(self) -> int:
        """Offset of the checksums in a copy: after the pages of the largest group."""
        return max(self.num_pages) * self.page_nbytes

    @cached_property
    def copy_nbytes(self) -> int:
        """Bytes of a copy, the same for blocks of all groups; whole cache lines."""
        sums = max(n * chunks for n, chunks in zip(self.num_pages, self.num_chunks, strict=True))
        return -(-(self.sums_offset + sums * SUM_NBYTES) // _LINE) * _LINE
