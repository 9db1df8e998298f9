"""Full attention: a token sees all earlier tokens, so pages are kept until the request ends."""

from __future__ import annotations

from collections.abc import Container, Sequence

from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager


class FullAttentionManager(SingleTypeKVCacheManager):
    """Pages without a window."""

    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        """Return the number of known blocks from the first one on."""
        for i, block_hash in enumerate(block_hashes):
            if block_hash not in known:
                return i
        return len(block_hashes)
