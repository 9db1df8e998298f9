"""KV-cache groups: layers that share block tables, over one pool of equal blocks.

With one kind of cache all layers form one group. With several (Gemma 2 and 3 alternate sliding
windows and full attention) every group has the same number of layers, so that a block has the same
number of bytes in each group. The i-th layer of every group uses the i-th physical tensor, and one
group uses a block id at a time. See vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager
from octavo.kv_cache.kinds.full_attention import FullAttentionManager
from octavo.kv_cache.kinds.sliding_window import SlidingWindowManager
from octavo.models.cache import AttentionCache, CacheSpec


def _attention_manager(cache: AttentionCache, block_size: int) -> SingleTypeKVCacheManager:
    if cache.sliding_window is None:
        return FullAttentionManager(block_size)
    return SlidingWindowManager(block_size, cache.sliding_window)


_ALIGNMENT = 64  # a cache line

# Factories of managers by kind of cache spec; the arguments are the spec and the block size.
MANAGERS: dict[type[Any], Callable[[Any, int], SingleTypeKVCacheManager]] = {
    AttentionCache: _attention_manager,
}


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with equal caches, which share block tables."""

    layer_indices: tuple[int, ...]
    """Indices among the layers with a cache."""
    cache: CacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """Shape of the KV cache."""

    num_blocks: int
    """Total number of blocks, including the null block 0."""
    block_size: int
    """Number of tokens in a block."""
    groups: Sequence[KVCacheGroup]

    def slot_nbytes(self, dtype: str) -> list[int]:
        """Return the bytes of a block in each physical tensor; see `slot_nbytes`."""
        return slot_nbytes(self.groups, self.block_size, dtype)

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
        places = sorted(
            (layer, g, t)
            for g, group in enumerate(self.groups)
            for t, layer in enumerate(group.layer_indices)
        )
        assert [layer for layer, _, _ in places] == list(range(len(places)))
        return places


def make_kv_cache_groups(caches: Sequence[CacheSpec]) -> list[KVCacheGroup]:
    """Sort layers into groups of equal size; the last group of a kind may be smaller.

    Args:
        caches: cache spec of each layer with a cache, as in `ModelSpec.caches`.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, cache in enumerate(caches):
        kinds.setdefault(cache, []).append(layer)
    size = min(map(len, kinds.values()))
    return [
        KVCacheGroup(tuple(layers[i : i + size]), cache)
        for cache, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]


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
    of_group = [group.cache.block_nbytes(block_size, dtype) for group in groups]
    if len(set(of_group)) > 1:  # each kind's numbers must be aligned in any block
        of_group = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in of_group]
    sizes = [0] * _group_size(groups)
    for nbytes, group in zip(of_group, groups, strict=True):
        for slot in range(len(group.layer_indices)):
            sizes[slot] = max(sizes[slot], nbytes)
    return sizes


def bytes_per_block(groups: Sequence[KVCacheGroup], block_size: int, dtype: str) -> int:
    """Return the bytes of a block in all physical tensors together; see `slot_nbytes`."""
    return sum(slot_nbytes(groups, block_size, dtype))


def find_full_attention(groups: Sequence[KVCacheGroup]) -> int | None:
    """Return the first group with full attention, or None."""
    for index, group in enumerate(groups):
        if isinstance(group.cache, AttentionCache) and group.cache.sliding_window is None:
            return index
    return None


def max_blocks_per_request(
    groups: Sequence[KVCacheGroup], block_size: int, num_tokens: int, max_num_batched_tokens: int
) -> int:
    """Return the maximum number of blocks that a request of `num_tokens` tokens holds."""
    return sum(
        make_manager(group.cache, block_size).max_blocks(num_tokens, max_num_batched_tokens)
        for group in groups
    )


def _group_size(groups: Sequence[KVCacheGroup]) -> int:
    return max(len(group.layer_indices) for group in groups)
