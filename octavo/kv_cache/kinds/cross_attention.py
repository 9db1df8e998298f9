"""Cross attention: pages of an encoder's rows, which requests with the same input share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from octavo.kv_cache.block_pool import BlockPool, KVCacheBlock
from octavo.request import Request


@dataclass(slots=True)
class _CrossBlocks:
    """Blocks of one request."""

    blocks: list[list[KVCacheBlock]]
    """Blocks of each group."""
    is_new: bool
    """True if the request's first step computes the encoder."""


class CrossAttentionManager:
    """Allocator of the blocks with the keys and values of encoders' rows.

    A request has all of its blocks from its first step on. They become known when they are
    allocated: the step runs the encoder before all other work, so a request that finds them, in
    this step or later, reads their contents. No step writes to them again.

    Args:
        pool: the pool of all blocks.
        block_size: rows in a block.
        groups: indices of the groups of cross attention in the pool.
    """

    def __init__(self, pool: BlockPool, block_size: int, groups: Sequence[int]) -> None:
        self.pool, self.block_size, self.groups = pool, block_size, groups
        self._requests: dict[str, _CrossBlocks] = {}

    def num_encoder_tokens(self, request: Request) -> int:
        """Return the tokens that encoders compute in the first step of a request without blocks."""
        if self._find(request) is not None:
            return 0
        return sum(item.num_encoder_tokens for item in request.mm_features)

    def num_needed(self, request: Request) -> int:
        """Return the number of free blocks that a request needs to start."""
        found = self._find(request)
        if found is None:
            return len(self.groups) * self._num_blocks(request)
        return sum(block.ref_cnt == 0 for block in chain.from_iterable(found))

    def begin(self, request: Request) -> None:
        """Allocate a request's blocks; there must be `num_needed` free ones."""
        found = self._find(request)
        if found is not None:
            for blocks in found:
                self.pool.touch(blocks)
            self._requests[request.request_id] = _CrossBlocks(found, is_new=False)
            return
        count, hashes = self._num_blocks(request), row_hashes(request, self.block_size)
        new = [self.pool.get_new_blocks(count, request.request_id) for _ in self.groups]
        for group_id, blocks in zip(self.groups, new, strict=True) if hashes else ():
            self.pool.cache_full_blocks(blocks, hashes, 0, count, group_id)
        self._requests[request.request_id] = _CrossBlocks(new, is_new=True)

    def is_new(self, request: Request) -> bool:
        """Return True if the first step of a request with blocks computes its encoder."""
        return self._requests[request.request_id].is_new

    def end(self, request: Request) -> None:
        """Free a request's blocks."""
        held = self._requests.pop(request.request_id)
        for blocks in held.blocks:
            self.pool.free_blocks(reversed(blocks))

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return the blocks of a request in order, one list for each group."""
        held = self._requests[request_id]
        return [[block.block_id for block in blocks] for blocks in held.blocks]

    def forget(self, request: Request) -> None:
        """Forget the known blocks of a request's encoder input."""
        for group_id in self.groups:
            known = self.pool.cached_blocks(group_id)
            for block_hash in row_hashes(request, self.block_size):
                if block_hash in known:
                    self.pool.uncache(known[block_hash])

    def check_integrity(self, live: Sequence[Request], ref_counts: list[int]) -> None:
        """Check the records of the requests with blocks, and add their references.

        Raises:
            AssertionError: the records are inconsistent.
        """
        if {request.request_id for request in live} != self._requests.keys():
            raise AssertionError("blocks of cross attention are held by others than live requests")
        for request in live:
            for blocks in self._requests[request.request_id].blocks:
                if len(blocks) != self._num_blocks(request):
                    raise AssertionError(f"{request.request_id}: cross attention has {blocks}")
                for block in blocks:
                    ref_counts[block.block_id] += 1

    def _num_blocks(self, request: Request) -> int:
        return -(-sum(item.num_rows for item in request.mm_features) // self.block_size)

    def _find(self, request: Request) -> list[list[KVCacheBlock]] | None:
        """Return the known blocks of a request's encoder input; None: some are not known."""
        hashes = row_hashes(request, self.block_size)
        if not hashes:
            return None
        found = []
        for group_id in self.groups:
            known = self.pool.cached_blocks(group_id)
            if hashes[0] not in known:
                return None
            blocks = [known[block_hash] for block_hash in hashes if block_hash in known]
            if len(blocks) < len(hashes):
                return None
            found.append(blocks)
        return found


def row_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the hash of each block of a request's rows; [] if others must not find them."""
    if not request.shares_blocks:
        return []
    items = tuple((item.identifier, item.num_rows) for item in request.mm_features)
    return _hashes(request.cache_scope or "", items, block_size)


@lru_cache(128)  # a request needs them several times, and may come again for other answers
def _hashes(scope: str, items: tuple[tuple[str, int], ...], block_size: int) -> list[bytes]:
    hashes, prefix = [], scope.encode()
    for identifier, num_rows in items:
        key = b"octavo-cross:%d:%b:%b" % (len(prefix), prefix, identifier.encode())
        for i in range(-(-num_rows // block_size)):
            hashes.append(hashlib.sha256(b"%b:%d" % (key, i)).digest())
    return hashes
