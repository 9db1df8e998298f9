"""What the KV-cache manager asks a kind of cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence


class SingleTypeKVCacheManager(ABC):
    """The rules of one kind of cache: what a request's block table in such a group looks like.

    It holds neither blocks nor requests: those are the `KVCacheManager`'s, which asks one of these
    for each group. What is defined here holds for pages that are kept until the request ends:
    entry i of the table is for the tokens `i * block_size` up to `(i + 1) * block_size`.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        """Blocks of tokens in the longest known prefix that a request can start from.

        A shorter prefix than the one returned need not do; a longer one does not. The request's
        table begins with the prefix's blocks, one entry for each.

        Args:
            block_hashes: of the prefixes to be considered, one for each block of tokens.
            num_tokens: of the request; the last one is computed again even if its block is known.
            known: hashes of the blocks that the prefix cache knows in this group.

        Returns:
            0 where there is none, or where the kind cannot serve any.
        """

    def num_blocks(self, num_tokens: int) -> int:
        """Entries of the table once the first `num_tokens` tokens have slots. Never falls."""
        return -(-num_tokens // self.block_size)

    def num_blocks_to_admit(self, end: int, num_tokens: int) -> int:
        """Entries for which there must be room before a request is started.

        Args:
            end: end of the slots that its first step wants.
            num_tokens: its known tokens.
        """
        return self.num_blocks(max(end, num_tokens))

    def num_full_blocks(self, num_computed_tokens: int) -> int:
        """Entries at the front that later steps only read.

        These may be made known to the prefix cache and shared; all others are one request's own.
        """
        return num_computed_tokens // self.block_size

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """The first entry that the next token, or any after it, looks at; never falls."""
        return 0

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request can hold at most at one time.

        Args:
            num_tokens: its greatest length.
            max_num_batched_tokens: the most slots that one step adds.
        """
        return self.num_blocks(num_tokens)
