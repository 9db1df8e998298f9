"""Sliding-window attention: pages outside of the window are freed."""

from __future__ import annotations

from collections.abc import Container, Sequence

from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager


class LocalAttentionManager(SingleTypeKVCacheManager):
    """Pages that are freed when no later token sees them.

    Subclasses decide the first visible position by `first_needed_block` and `max_blocks`.
    """

    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        """Implement `SingleTypeKVCacheManager`.

        A prefix is usable if all blocks before its end that the next token sees are known.
        """
        end = len(block_hashes)
        while end:
            first = self.first_needed_block(min(end * self.block_size, num_tokens - 1))
            missing = next(
                (i for i in range(end - 1, first - 1, -1) if block_hashes[i] not in known), None
            )
            if missing is None:
                return end
            end = missing
        return 0

    def num_blocks_to_admit(self, end: int, num_tokens: int) -> int:
        """Return the first step's entries: pages that are freed make room for later ones."""
        return self.num_blocks(end)


class SlidingWindowManager(LocalAttentionManager):
    """Pages with a window.

    Args:
        block_size: tokens in a block.
        sliding_window: number of positions visible to a token, including itself.
    """

    def __init__(self, block_size: int, sliding_window: int) -> None:
        super().__init__(block_size)
        self.sliding_window = sliding_window

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the entry with the first position in the next token's window."""
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Return the blocks of a window and one step's new tokens, at any offset within a block."""
        span = self.sliding_window - 1 + max_num_batched_tokens
        return min(self.num_blocks(num_tokens), self.num_blocks(span) + 1)
