"""Interface of a kind of cache for the KV-cache manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence


class SingleTypeKVCacheManager(ABC):
    """Rules of one kind of cache: the layout of a request's block table in such a group.

    `KVCacheManager` holds blocks and requests, and calls one of these objects for each group. The
    methods defined here describe pages that are kept until the request ends: entry i of the table
    is for the tokens `i * block_size` up to `(i + 1) * block_size`.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        """Return the number of blocks in the longest known prefix that a request can start from.

        A shorter prefix may be unusable; every longer one is unusable. The request's table begins
        with the prefix's blocks, one entry for each.

        Args:
            block_hashes: hashes of the prefixes to consider, one for each block of tokens.
            num_tokens: tokens of the request; the last one is computed again even if its block is
                known.
            known: hashes of the blocks that the prefix cache knows in this group.

        Returns:
            0 if no prefix is usable.
        """

    def num_blocks(self, num_tokens: int) -> int:
        """Return the table's length for slots of `num_tokens` tokens. Never decreases."""
        return -(-num_tokens // self.block_size)

    def num_blocks_to_admit(self, end: int, num_tokens: int) -> int:
        """Return the number of entries that need free blocks before a request is started.

        Args:
            end: end of the slots of its first step.
            num_tokens: its known tokens.
        """
        return self.num_blocks(max(end, num_tokens))

    def num_full_blocks(self, num_computed_tokens: int) -> int:
        """Return the number of entries at the front that later steps only read.

        The prefix cache may know and share these; all others belong to one request.
        """
        return num_computed_tokens // self.block_size

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the first entry that the next token, or any after it, reads; never decreases."""
        return 0

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Return the maximum number of blocks that one request holds at one time.

        Args:
            num_tokens: its maximum length.
            max_num_batched_tokens: maximum number of slots that one step adds.
        """
        return self.num_blocks(num_tokens)
