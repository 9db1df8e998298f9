"""Sliding-window attention: pages that have left the window are given back."""

from __future__ import annotations

from collections.abc import Container, Sequence

from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Pages with a window.

    Args:
        block_size: tokens in a block.
        sliding_window: positions that a token sees, itself included.
    """

    def __init__(self, block_size: int, sliding_window: int) -> None:
        super().__init__(block_size)
        self.sliding_window = sliding_window

    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        """The blocks of the window before its end must be known."""
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
        """The first step's: what leaves the window makes room for what comes."""
        return self.num_blocks(end)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """The one that holds the first position in the next token's window."""
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """A window and one step's new tokens, which may begin and end anywhere in a block."""
        span = self.sliding_window - 1 + max_num_batched_tokens
        return min(self.num_blocks(num_tokens), self.num_blocks(span) + 1)
