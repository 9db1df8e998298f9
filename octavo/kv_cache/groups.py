"""KV-cache groups: layers that share block tables, over one pool of equal blocks.

With one kind of cache all layers form one group. With several (Gemma 2 and 3 alternate sliding
windows and full attention) every group has the same number of layers, so that a block has the same
number of bytes in each group. The i-th layer of every group uses the i-th physical tensor, and one
group uses a block id at a time. See vLLM's hybrid KV cache manager.

Layers with a recurrent state use no blocks. They form groups at the end. Each of these layers has a
physical tensor of its own, which consists of slots (`kv_cache/states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, repeat
from typing import Any

from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager
from octavo.kv_cache.kinds.chunked_attention import ChunkedAttentionManager
from octavo.kv_cache.kinds.full_attention import FullAttentionManager
from octavo.kv_cache.kinds.sliding_window import SlidingWindowManager
from octavo.models.cache import (
    AttentionCache,
    CacheSpec,
    CrossCache,
    EncoderCache,
    LatentCache,
)
from octavo.models.state_cache import StateCache


def _attention_manager(cache: AttentionCache, block_size: int) -> SingleTypeKVCacheManager:
    if cache.chunk_size is not None:
        return ChunkedAttentionManager(block_size, cache.chunk_size)
    if cache.sliding_window is not None:
        return SlidingWindowManager(block_size, cache.sliding_window)
    return FullAttentionManager(block_size)


_ALIGNMENT = 64  # a cache line

# Factories of managers by kind of cache spec; the arguments are the spec and the block size.
MANAGERS: dict[type[Any], Callable[[Any, int], SingleTypeKVCacheManager]] = {
    AttentionCache: _attention_manager,
    CrossCache: lambda cache, block_size: FullAttentionManager(block_size),  # of the rows
    EncoderCache: lambda cache, block_size: FullAttentionManager(block_size),
    LatentCache: lambda cache, block_size: FullAttentionManager(block_size),
}


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with equal caches, which share block tables."""

    layer_indices: tuple[int, ...]
    """Indices among the layers with a cache."""
    cache: CacheSpec

    @property
    def has_states(self) -> bool:
        """True if its layers have recurrent states, in slots instead of blocks."""
        return isinstance(self.cache, StateCache)

    @property
    def is_cross(self) -> bool:
        """True if its blocks have the rows of encoders; see `CrossAttentionManager`."""
        return isinstance(self.cache, CrossCache)

    @property
    def num_tensors(self) -> int:
        """Number of physical tensors of its layers: each has its own, but encoders share one."""
        return 1 if isinstance(self.cache, EncoderCache) else len(self.layer_indices)


@dataclass(frozen=True)
class KVCacheConfig:
    """Shape of the KV cache."""

    num_blocks: int
    """Total number of blocks, including the null block 0."""
    block_size: int
    """Number of tokens in a block."""
    groups: Sequence[KVCacheGroup]
    num_states: int = 0
    """Number of slots for recurrent states."""
    states_per_request: int = 1
    """Number of slots of a request's live state; see `StateManager`."""

    @cached_property
    def paged_groups(self) -> list[KVCacheGroup]:
        """Groups that use blocks; they precede the others."""
        return [group for group in self.groups if not group.has_states]

    @property
    def num_paged_tensors(self) -> int:
        """Number of physical tensors that consist of blocks; they precede the others."""
        return _group_size(self.groups)

    def tensor_sizes(self, dtype: str) -> list[tuple[int, int]]:
        """Return the shape of each physical tensor: (blocks or slots, bytes of one)."""
        blocks = slot_nbytes(self.groups, self.block_size, dtype)
        states = [
            group.cache.block_nbytes(self.block_size, dtype)
            for group in self.groups
            if group.has_states
            for _ in group.layer_indices
        ]
        return [(self.num_blocks, n) for n in blocks] + [(self.num_states, n) for n in states]

    @cached_property
    def layer_to_group(self) -> list[int]:
        """Index of each layer's group."""
        return [g for _, g, _ in self._places]

    @cached_property
    def layer_to_tensor(self) -> list[int]:
        """Index of each layer's physical tensor."""
        return [t for _, _, t in self._places]

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """Tuples (layer, group, tensor) of all layers, in order."""
        places, own = [], count(_group_size(self.groups))
        for g, group in enumerate(self.groups):
            tensors: Iterator[int] = own if group.has_states else count()
            if isinstance(group.cache, EncoderCache):
                tensors = repeat(0)
            places += [(layer, g, next(tensors)) for layer in group.layer_indices]
        places.sort()
        assert [layer for layer, _, _ in places] == list(range(len(places)))
        return places


def make_kv_cache_groups(caches: Sequence[CacheSpec]) -> list[KVCacheGroup]:
    """Sort layers into groups of equal size; the last group of a kind may be smaller.

    Groups of cross attention follow the other groups with blocks. Layers with recurrent states form
    one group for each kind, after the others.

    Args:
        caches: cache spec of each layer with a cache, as in `ModelSpec.caches`.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, cache in enumerate(caches):
        kinds.setdefault(cache, []).append(layer)
    states = [
        KVCacheGroup(tuple(kinds.pop(cache)), cache)
        for cache in list(kinds)
        if isinstance(cache, StateCache)
    ]
    size = min(map(len, kinds.values()), default=0)
    paged = [
        KVCacheGroup(tuple(layers[i : i + size]), cache)
        for cache, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]
    paged.sort(key=lambda group: group.is_cross)
    return paged + states


def select_layers(groups: Sequence[KVCacheGroup], begin: int, end: int) -> list[KVCacheGroup]:
    """Return the groups with only the layers `begin` up to `end`, renumbered from 0: a stage's.

    All groups stay, since stages share block tables; some may have no layer.
    """
    return [
        replace(
            group,
            layer_indices=tuple(i - begin for i in group.layer_indices if begin <= i < end),
        )
        for group in groups
    ]


def make_manager(cache: CacheSpec, block_size: int) -> SingleTypeKVCacheManager:
    """Make the manager of a group with this cache."""
    return MANAGERS[type(cache)](cache, block_size)


def slot_nbytes(groups: Sequence[KVCacheGroup], block_size: int, dtype: str) -> list[int]:
    """Return the bytes of a block in each physical tensor.

    The i-th layers of all groups share the i-th tensor, so the largest of their blocks determines
    the size there.

    Args:
        groups: groups of the KV cache.
        block_size: number of tokens of a block.
        dtype: data type of the cache, as `CacheSpec` names it.
    """
    groups = [group for group in groups if not group.has_states]
    of_group = [group.cache.block_nbytes(block_size, dtype) for group in groups]
    if len(set(of_group)) > 1:  # each kind's numbers must be aligned in any block
        of_group = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in of_group]
    sizes = [0] * _group_size(groups)
    for nbytes, group in zip(of_group, groups, strict=True):
        for slot in range(group.num_tensors):
            sizes[slot] = max(sizes[slot], nbytes)
    return sizes


def bytes_per_block(groups: Sequence[KVCacheGroup], block_size: int, dtype: str) -> int:
    """Return the bytes of a block in all physical tensors together; see `slot_nbytes`."""
    return sum(slot_nbytes(groups, block_size, dtype))


def state_nbytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of a slot of recurrent states, of all layers together."""
    return sum(
        len(group.layer_indices) * group.cache.nbytes
        for group in groups
        if isinstance(group.cache, StateCache)
    )


def find_full_attention(groups: Sequence[KVCacheGroup]) -> int | None:
    """Return the first group with full attention, or None."""
    for index, group in enumerate(groups):
        cache = group.cache
        if isinstance(cache, LatentCache):
            return index
        if isinstance(cache, AttentionCache) and cache.sees_all:
            return index
    return None


def max_blocks_per_request(
    groups: Sequence[KVCacheGroup],
    block_size: int,
    num_tokens: int,
    max_num_batched_tokens: int,
    num_rows: int = 0,
) -> int:
    """Return the maximum number of blocks that a request of `num_tokens` tokens holds.

    `num_rows` is the number of rows of an encoder that its tokens attend to.
    """
    return sum(
        make_manager(group.cache, block_size).max_blocks(
            num_rows if group.is_cross else num_tokens, max_num_batched_tokens
        )
        for group in groups
        if not group.has_states
    )


def _group_size(groups: Sequence[KVCacheGroup]) -> int:
    """Return the number of physical tensors of blocks."""
    return max((group.num_tensors for group in groups if not group.has_states), default=0)
