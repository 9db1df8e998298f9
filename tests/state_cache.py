"""Toy kind of cache: a state of each request, as in a layer without attention.

It is what docs/architecture.md shows under "A cache kind": a spec, its manager and one line that
joins them. The state is a fixed number of blocks, which every step rewrites: it never grows, and
no prefix of it can be found or shared. `tests/state_model.py` computes with it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.kv_cache.groups import MANAGERS
from octavo.kv_cache.kinds.base import SingleTypeKVCacheManager
from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class StateCache:
    """A state in blocks of `nbytes`."""

    num_blocks: int
    nbytes: int = 8

    rolls_back = False

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        return self.nbytes

    def view(self, memory, block_size, dtype, backend):
        """float32 [num_blocks, nbytes / 4]."""
        return memory[:, : self.nbytes].view("float32")

    def metadata(self, table, group, max_query_len, max_seq_len):
        return StateMetadata(table.query_start_loc, table.block_tables[group])

    def pages(self):
        raise ConfigError(
            "kv_transfer_config is not supported with models that keep a state; leave it out."
        )


@dataclass
class StateMetadata:
    """Positions of the states of a step's requests; the tables may be larger."""

    query_start_loc: HostTensor
    block_table: HostTensor

    def rows(self, requests: int):
        """Yield (block, first token, end) of each request."""
        for i in range(requests):
            begin, end = self.query_start_loc.numpy()[i : i + 2].tolist()
            yield int(self.block_table.numpy()[i, 0]), begin, end


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
