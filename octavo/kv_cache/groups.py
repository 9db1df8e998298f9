"""KV-cache groups: layers that share block tables, over one pool of equal blocks.

With one kind of attention all layers form one group. With several (Gemma 2 and 3 alternate sliding
windows and full attention) every group gets the same number of layers, so that a block costs the
same number of bytes whichever group takes it: the i-th layer of every group lives in the i-th
physical tensor, and a block id is used by one group at a time. See vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_DTYPE_NBYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with one kind of attention that share block tables."""

    layer_indices: tuple[int, ...]
    sliding_window: int | None = None
    """Positions that a token sees, itself included; None: all before it."""

    def first_needed_position(self, num_computed_tokens: int) -> int:
        """The lowest position whose KV the next token, or any after it, will look at."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1)


@dataclass(frozen=True)
class KVCacheConfig:
    """The shape of the KV cache."""

    num_blocks: int
    """Blocks in all, the null block 0 included."""
    block_size: int
    """Tokens in a block."""
    groups: Sequence[KVCacheGroup]
    group_size: int
    """Layers of the largest group: physical tensors, each shaped for `num_blocks`."""
    bytes_per_block: int
    """Bytes of a block in all physical tensors together."""

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""
        return len(self.layer_to_group)

    @cached_property
    def layer_to_group(self) -> list[int]:
        """For each layer the index of its group."""
        return [g for _, g, _ in self._places]

    @cached_property
    def layer_to_tensor(self) -> list[int]:
        """For each layer the index of its physical tensor."""
        return [t for _, _, t in self._places]

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """(layer, group, tensor) of each layer, in order of the layers."""
        places = sorted(
            (layer, g, t)
            for g, group in enumerate(self.groups)
            for t, layer in enumerate(group.layer_indices)
        )
        assert [layer for layer, _, _ in places] == list(range(len(places)))
        return places


def make_kv_cache_groups(
    layer_windows: Sequence[int | None],
) -> tuple[list[KVCacheGroup], int]:
    """Sorts layers into groups of equal size.

    Args:
        layer_windows: for each layer its sliding window, or None for full attention.

    Returns:
        The groups, and the number of layers in each; the last group of a kind may be short.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    groups = [
        KVCacheGroup(tuple(layers[i : i + size]), window)
        for window, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]
    return groups, size


def bytes_per_block(
    group_size: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str
) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in `group_size` layers.

    Args:
        group_size: layers.
        block_size: tokens.
        num_kv_heads: heads of keys and values.
        head_size: elements of a head.
        dtype: of the cache: "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "int8";
            the last has a float32 scale for each head.
    """
    head = head_size * _DTYPE_NBYTES[dtype] + (4 if dtype == "int8" else 0)
    return 2 * group_size * block_size * num_kv_heads * head


def max_blocks_per_request(
    groups: Sequence[KVCacheGroup], block_size: int, num_tokens: int, max_num_batched_tokens: int
) -> int:
    """Blocks that one request of `num_tokens` tokens can hold at most at one time.

    A sliding-window group holds a window and one step's new tokens, which may begin and end
    anywhere in a block.
    """
    whole = -(-num_tokens // block_size)
    total = 0
    for group in groups:
        if group.sliding_window is None:
            total += whole
        else:
            span = group.sliding_window - 1 + max_num_batched_tokens
            total += min(whole, -(-span // block_size) + 1)
    return total
