"""Layout of a block of the KV cache, for connectors that copy it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

import msgspec

import octavo
from octavo.kv_cache.groups import KVCacheGroup, make_manager, slot_nbytes, state_nbytes
from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager
from octavo.models.cache import Pages

SUM_NBYTES = 8
_LINE = 64
_VERSION = 3
# Bytes of a state in a copy, and the number of its layers, if a rank has no pages of blocks.
_PIECE_NBYTES, _PIECE_SLICES = 2**16, 64


class KVPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a model's blocks that a rank's copies have, and the sizes in a copy."""

    layers: list[list[int]]
    """Layers of each group, by their numbers in the model."""
    first_heads: list[int]
    """First head of each group."""
    num_heads: list[int]
    """Number of heads of each group."""
    chunk_nbytes: list[int]
    """Bytes of a head's keys, or values, of a block, for each group."""
    sums_offset: int
    copy_nbytes: int
    """Bytes of a copy."""

    def cells(self) -> set[tuple[int, int, int]]:
        """Return (group, layer, head) of all contents."""
        return {
            (group_id, layer, self.first_heads[group_id] + head)
            for group_id, layers in enumerate(self.layers)
            for layer in layers
            for head in range(self.num_heads[group_id])
        }


class StateSlice(NamedTuple):
    """Part of the state of one layer, in one copy."""

    layer: int
    """Layer of the rank, among those with a cache."""
    tensor: int
    """Physical tensor of the layer."""
    row_nbytes: int
    """Bytes of a slot of that tensor."""
    begin: int
    """Offset in the slot, in bytes."""
    nbytes: int
    offset: int
    """Offset in the copy, in bytes."""


@dataclass(frozen=True)
class KVLayout:
    """Contents of a block on one rank, and all that its bytes depend on.

    A block of a group has a page for each layer's keys and one for its values, and a page
    has a chunk for each head. Each chunk has a checksum. A copy of a block consists of its pages in
    the order of the layers, then the checksums. Pages of groups may differ in size. All copies are
    as large as that of the largest block.

    A recurrent state may be much larger than a block, so its copy consists of pieces. A piece has
    the size of a block's copy and contains slices of the state, then a checksum of each. The states
    of pipeline stages differ in size. All ranks have the same number of pieces, so that they use
    the same keys; the last pieces of a small state are empty.
    """

    model: str
    """Identity of the model and its form (`model_hash`, dtype, quantization ...)."""
    block_size: int
    dtype: str
    """Dtype of the KV cache, as `CacheSpec` names it."""
    groups: tuple[KVCacheGroup, ...]
    """KV-cache groups that use blocks, with the layers and heads of this rank; those of cross
    attention are the last."""
    states: tuple[KVCacheGroup, ...] = ()
    """KV-cache groups with recurrent states."""
    first_layer: int = 0
    """Number of the groups' layer 0 in the model."""
    rank: int = 0
    world_size: int = 1
    """Number of processes that have a part of each block."""
    sums_in_parts: bool = False
    """True if ranks sum up parts of a number (tensor_parallel_mode=reduce)."""
    largest_copy_nbytes: int = 0
    """Bytes of the largest copy on any rank; 0: this rank's."""
    most_pieces: int = 0
    """Most pieces of a state on any rank; 0: this rank's."""

    @cached_property
    def identity(self) -> bytes:
        """32 bytes that differ if a block of the same tokens might hold other bytes.

        They depend on the division of the model among processes only if the numbers do.
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
            first_heads=[getattr(group.cache, "first_kv_head", 0) for group in self.groups],
            num_heads=self.num_chunks,
            chunk_nbytes=[
                nbytes // chunks
                for nbytes, chunks in zip(self.page_nbytes, self.num_chunks, strict=True)
            ],
            sums_offset=self.sums_offset,
            copy_nbytes=self.copy_nbytes,
        )

    @cached_property
    def managers(self) -> list[SingleTypeKVCacheManager]:
        """Manager of each group with blocks of tokens; those of cross attention follow them."""
        return [
            make_manager(group.cache, self.block_size)
            for group in self.groups
            if not group.is_cross
        ]

    @property
    def cross_groups(self) -> range:
        """Indices of the groups with blocks of cross attention."""
        return range(len(self.managers), len(self.groups))

    @cached_property
    def page_nbytes(self) -> list[int]:
        """Bytes of a page of a layer, for each group.

        Raises:
            ConfigError: a kind of cache is unsupported.
        """
        return [
            group.cache.block_nbytes(self.block_size, self.dtype) // pages.count
            for group, pages in zip(self.groups, self.pages, strict=True)
        ]

    @cached_property
    def row_nbytes(self) -> list[int]:
        """Bytes of a block in each physical tensor; the block of a group may be smaller."""
        return slot_nbytes(self.groups, self.block_size, self.dtype)

    @cached_property
    def pages(self) -> list[Pages]:
        """Pages of a block of each group."""
        return [group.cache.pages() for group in self.groups]

    @cached_property
    def num_chunks(self) -> list[int]:
        """Number of chunks of a page, for each group."""
        return [pages.chunks for pages in self.pages]

    @cached_property
    def num_pages(self) -> list[int]:
        """Number of pages of a block, for each group."""
        pairs = zip(self.groups, self.pages, strict=True)
        return [pages.count * len(group.layer_indices) for group, pages in pairs]

    @cached_property
    def sums_offset(self) -> int:
        """Offset of the checksums in a copy: after the pages of the largest group."""
        if not any(self.num_pages):
            return min(_PIECE_NBYTES, state_nbytes(self.states))
        return max(n * size for n, size in zip(self.num_pages, self.page_nbytes, strict=True))

    @cached_property
    def num_sums(self) -> int:
        """Number of checksums for which a copy has room."""
        if not any(self.num_pages):
            return _PIECE_SLICES
        return max(n * chunks for n, chunks in zip(self.num_pages, self.num_chunks, strict=True))

    @cached_property
    def copy_nbytes(self) -> int:
        """Bytes of a copy: the same for blocks of all groups, and whole cache lines."""
        return -(-(self.sums_offset + self.num_sums * SUM_NBYTES) // _LINE) * _LINE

    @property
    def slot_nbytes(self) -> int:
        """Bytes of memory for a copy on any rank."""
        return max(self.copy_nbytes, self.largest_copy_nbytes)

    @cached_property
    def pieces(self) -> list[list[StateSlice]]:
        """Pieces of a state's copy: the layers one after another, cut where a copy is full."""
        return self._own_pieces + [[]] * (self.num_pieces - len(self._own_pieces))

    @cached_property
    def _own_pieces(self) -> list[list[StateSlice]]:
        """The pieces that are not empty."""
        tensors = count(max((len(group.layer_indices) for group in self.groups), default=0))
        rows = sorted(
            (layer, next(tensors), group.cache.block_nbytes(self.block_size, self.dtype))
            for group in self.states
            for layer in group.layer_indices
        )
        pieces: list[list[StateSlice]] = []
        room = 0
        for layer, tensor, nbytes in rows:
            begin = 0
            while begin < nbytes:
                if not room or len(pieces[-1]) == self.num_sums:
                    pieces.append([])
                    room = self.sums_offset
                size = min(room, nbytes - begin)
                offset = self.sums_offset - room
                pieces[-1].append(StateSlice(layer, tensor, nbytes, begin, size, offset))
                begin, room = begin + size, room - size
        return pieces

    def state_keys(self, block_hash: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the keys of a state's pieces; those of blocks are (group, hash).

        Args:
            block_hash: hash of the last block of the state's tokens.
        """
        for number in range(len(self.groups), self.num_kinds):
            yield number, block_hash

    @cached_property
    def state_division(self) -> str:
        """Digest of the part of a state in this rank's pieces; "" without states.

        Engines can exchange pieces if it is equal for all ranks.
        """
        if not self.states:
            return ""
        text = str((self.first_layer, self.pieces))
        return hashlib.sha256(b"octavo-kv-states:" + text.encode()).hexdigest()[:16]

    @cached_property
    def own_identity(self) -> bytes:
        """32 bytes that differ if this rank's copies might hold other bytes.

        They depend on `identity` and on the part of the model that this rank has.
        """
        text = str((self.part, self.first_layer, self.pieces, self.rank, self.world_size))
        return hashlib.sha256(b"octavo-kv-copies:" + self.identity + text.encode()).digest()

    @property
    def num_pieces(self) -> int:
        """Number of pieces of a state, the same on all ranks."""
        return max(len(self._own_pieces), self.most_pieces)

    @property
    def num_kinds(self) -> int:
        """Number of kinds of copies: of each group's blocks, and each piece of a state."""
        return len(self.groups) + self.num_pieces

    @property
    def least_copies(self) -> int:
        """Number of copies of the smallest content that can be loaded: a block, and a state."""
        return self.num_pieces + bool(self.groups)
