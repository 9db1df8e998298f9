"""Pool of KV-cache blocks: free blocks, shared blocks, and blocks with a known prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.given_up import GivenUpLog

# Block 0 holds no request's KV; block tables use it in place of blocks that are not needed.
NULL_BLOCK_ID = 0


class KVCacheBlock:
    """Record of a block.

    A block is in one of three states: in use (`ref_cnt` > 0), free and forgotten, or free but still
    holding a known prefix (`block_hash` set), which a request may use again.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """Hash; set while the prefix cache knows the block."""
        self.group_id = 0
        """KV-cache group that knows `block_hash`."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        known = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={known})"


class FreeKVCacheBlockQueue:
    """Doubly linked list of the free blocks, in the order of reuse.

    All operations are O(1), including removal from the middle: a cached block that is hit again can
    leave the queue at any position.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Two sentinels avoid special cases at the ends.
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Remove and return the first block, which was freed least recently."""
        block = self._head.next_free
        assert block is not self._tail, "no free block"
        assert block is not None
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Add a block at the end: it will be reused last."""
        assert self._tail.prev_free is not None
        self._insert_after(self._tail.prev_free, block)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Add a block at the front: it will be reused next."""
        self._insert_after(self._head, block)

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block from the middle."""
        prev, next_ = block.prev_free, block.next_free
        assert prev is not None, f"{block} is not in the free queue"
        assert next_ is not None
        prev.next_free, next_.prev_free = next_, prev
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def last_known(self, count: int) -> list[int]:
        """Return the ids of the last `count` blocks with a known prefix; the last one is first.

        The queue must have as many. The walk ends with the first of them.
        """
        ids: list[int] = []
        block = self._tail.prev_free
        while len(ids) < count:
            assert block is not None
            if block.block_hash is not None:
                ids.append(block.block_id)
            block = block.prev_free
        return ids

    def to_list(self) -> list[KVCacheBlock]:
        """Return all free blocks in order, for checks.

        Raises:
            AssertionError: the links of the list are inconsistent.
        """
        blocks = []
        block = self._head
        while block is not self._tail:
            next_ = block.next_free
            if next_ is None or next_.prev_free is not block:
                raise AssertionError(f"the free queue is broken after {block}")
            block = next_
            blocks.append(block)
        return blocks[:-1]

    def _insert_after(self, prev: KVCacheBlock, block: KVCacheBlock) -> None:
        assert block.prev_free is None, f"{block} is in the free queue already"
        next_ = prev.next_free
        assert next_ is not None
        block.prev_free, block.next_free = prev, next_
        prev.next_free = next_.prev_free = block
        self.num_free_blocks += 1


class BlockPool:
    """All blocks of the KV cache, and the index of those with a known prefix.

    The least recently used block is reused first. A freed block without a known prefix is put at
    the front of the queue, one with a prefix at the end: useful blocks live longest.

    Args:
        num_blocks: total number of blocks, including the null block.
        num_groups: number of KV-cache groups; each has its own known hashes.
        enable_caching: True to keep known prefixes after their last user has ended; False if only
            live requests share blocks.
        events: log of forgotten prefixes.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        enable_caching: bool = True,
        events: KVEventLog | None = None,
    ) -> None:
        assert num_blocks > 1, "the pool needs the null block and at least one other"
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_cnt = 1  # never free
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.num_usable_blocks = num_blocks - 1
        self.enable_caching = enable_caching
        self.num_evictions = 0
        """Number of known prefixes lost to reuse of their block."""
        self.events = events
        self.given_up: GivenUpLog | None = None
        """Log of the prefixes lost to reuse; None if no reader needs it."""
        self._cached: list[dict[bytes, KVCacheBlock]] = [{} for _ in range(num_groups)]

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated, including cached ones."""
        return self.free_queue.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that live requests hold."""
        return self.num_usable_blocks - self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_usable_blocks

    def get_new_blocks(self, count: int, user: str | None = None) -> list[KVCacheBlock]:
        """Allocate `count` blocks with one reference each; there must be enough free ones.

        `user` is the request that gets them.
        """
        assert count <= self.num_free_blocks, f"{count} blocks of {self.num_free_blocks} free"
        blocks = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                if self.given_up is not None:
                    self.given_up.note(block.block_hash, user)
                self.uncache(block)
                self.num_evictions += 1
            block.ref_cnt = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block, removing free ones from the free queue."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block; those without any become free, in the given order."""
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is not None and not self.enable_caching:
                self.uncache(block)
            if block.block_hash is None:
                self.free_queue.appendleft(block)
            else:
                self.free_queue.append(block)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[bytes],
        start: int,
        end: int,
        group_id: int,
    ) -> list[KVCacheBlock]:
        """Make a request's blocks `start` up to `end` known; return the newly known ones.

        If another block already holds the same prefix, that one stays known instead.
        """
        cached = self._cached[group_id]
        new = []
        for block, block_hash in zip(blocks[start:end], block_hashes[start:end], strict=True):
            if block is self.null_block or block.block_hash is not None or block_hash in cached:
                continue
            block.block_hash, block.group_id = block_hash, group_id
            cached[block_hash] = block
            new.append(block)
        return new

    def cached_blocks(self, group_id: int) -> Mapping[bytes, KVCacheBlock]:
        """Return the blocks with a known prefix in this group, by its hash."""
        return self._cached[group_id]

    def known_blocks(self) -> list[int]:
        """Return the ids of all blocks with a known prefix."""
        return [block.block_id for known in self._cached for block in known.values()]

    def uncache(self, block: KVCacheBlock) -> None:
        """Remove a block from the prefix cache."""
        assert block.block_hash is not None
        del self._cached[block.group_id][block.block_hash]
        if self.events is not None and self.events.group_id == block.group_id:
            self.events.note_removed(block.block_hash)
        block.block_hash = None

    def forget_all(self) -> None:
        """Forget all known prefixes; blocks in use stay in use, but are no longer known.

        The free ones are reused next: unlike blocks that were never used, they have memory.
        """
        for cached in self._cached:
            for block in list(cached.values()):
                self.uncache(block)
                if block.ref_cnt == 0:
                    self.free_queue.remove(block)
                    self.free_queue.appendleft(block)
        if self.events is not None:
            self.events.note_cleared()

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Check that the records are consistent with each other and with the requests' references.

        Args:
            ref_counts: for each block id the number of references to it.

        Raises:
            AssertionError: the records are inconsistent; the message names the inconsistency.
        """
        free = self.free_queue.to_list()
        if len(free) != self.num_free_blocks:
            raise AssertionError(f"{len(free)} free blocks, counted as {self.num_free_blocks}")
        in_queue = {block.block_id for block in free}
        if len(in_queue) != len(free):
            raise AssertionError("a block is in the free queue twice")
        num_hashed = 0
        for block in self.blocks[1:]:
            if block.ref_cnt != ref_counts[block.block_id]:
                raise AssertionError(f"{block} has {ref_counts[block.block_id]} real references")
            if (block.ref_cnt == 0) != (block.block_id in in_queue):
                raise AssertionError(f"{block} is lost, or both free and in use")
            if block.block_hash is not None:
                num_hashed += 1
                if self._cached[block.group_id].get(block.block_hash) is not block:
                    raise AssertionError(f"the prefix cache does not list {block}")
                if block.ref_cnt == 0 and not self.enable_caching:
                    raise AssertionError(f"{block} is kept though caching is off")
        if num_hashed != sum(map(len, self._cached)):
            raise AssertionError("the prefix cache lists blocks without a hash")
        null = self.null_block
        if null.ref_cnt != 1 or null.block_hash is not None or null.block_id in in_queue:
            raise AssertionError(f"the null block was used: {null}")
