"""Toy kind of cache: a state for each request, as a layer without attention keeps one.

docs/architecture.md shows it under "A cache kind": a spec, its manager and one line that connects
them. The state is a fixed number of blocks, which every step rewrites: it never grows, and
no prefix of it can be found or shared.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from octavo.kv_cache.groups import MANAGERS
from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager


@dataclass(frozen=True)
class StateCache:
    """State that is divided into blocks as large as the other layers' pages."""

    num_blocks: int
    nbytes: int = 8

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        return self.nbytes


class StateManager(SingleTypeKVCacheManager):
    def __init__(self, cache: StateCache, block_size: int) -> None:
        super().__init__(block_size)
        self.cache = cache

    def longest_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, known: Container[bytes]
    ) -> int:
        return 0

    def num_blocks(self, num_tokens: int) -> int:
        return self.cache.num_blocks

    def num_full_blocks(self, num_computed_tokens: int) -> int:
        return 0


MANAGERS[StateCache] = StateManager
