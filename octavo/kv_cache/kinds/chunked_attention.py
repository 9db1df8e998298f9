"""Chunked attention: pages of earlier chunks are freed (Llama 4)."""

from __future__ import annotations

from octavo.kv_cache.kinds.sliding_window import LocalAttentionManager


class ChunkedAttentionManager(LocalAttentionManager):
    """Pages of which a token sees those of its own chunk of positions.

    Args:
        block_size: tokens in a block.
        chunk_size: positions of a chunk; the first begins at 0.
    """

    def __init__(self, block_size: int, chunk_size: int) -> None:
        super().__init__(block_size)
        self.chunk_size = chunk_size

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the entry with the first position of the next token's chunk."""
        return num_computed_tokens // self.chunk_size * self.chunk_size // self.block_size

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Return the blocks of a chunk and one step's new tokens, at any offset within a block."""
        span = self.chunk_size - 1 + max_num_batched_tokens
        return min(self.num_blocks(num_tokens), self.num_blocks(span) + 1)
