"""The pool of KV-cache blocks: who is free, who is shared, who holds a known prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from octavo.kv_cache.events import KVEventLog

# Block 0 holds no request's KV; block tables use it where a block is not needed (any more).
NULL_BLOCK_ID = 0


class KVCacheBlock:
    """The record of one block.

    A block is in one of three states: in use (`ref_cnt` > 0), free and forgotten, or free but
    still holding a known prefix (`block_hash` set), which a request may take up again.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """Set while the prefix cache knows the block."""
        self.group_id = 0
        """KV-cache group under which `block_hash` is known."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        known = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={known})"


class FreeKVCacheBlockQueue:
    """Doubly linked list of the free blocks, in the order in which they will be reused.

    All operations are O(1), removal from the middle included: a cached block that is hit again
    leaves the queue wherever it stands.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Two sentinels spare every operation the special cases of the ends.
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that has waited longest."""
        block = self._head.next_free
        assert block is not self._tail, "no free block"
        assert block is not None
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block at the end: it will be reused last."""
        assert self._tail.prev_free is not None
        self._insert_after(self._tail.prev_free, block)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Puts a block at the front: it will be reused next."""
        self._insert_after(self._head, block)

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out of the middle."""
        prev, next_ = block.prev_free, block.next_free
        assert prev is not None, f"{block} is not in the free queue"
        assert next_ is not None
        prev.next_free, next_.prev_free = next_, prev
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def to_list(self) -> list[KVCacheBlock]:
        """All free blocks in order, for checks.

        Raises:
            AssertionError: if the links of the list contradict one another.
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
    """All blocks of the KV cache, and the index of those that hold a known prefix.

    Blocks are reused least recently used first. A freed block that holds no known prefix goes to
    the front of the queue, one that does goes to the end: what can still be useful lives longest.

    Args:
        num_blocks: blocks in all, the null block included.
        num_groups: KV-cache groups; a hash is known for each group on its own.
        enable_caching: keep known prefixes after their last user has gone. Without it, only live
            requests share blocks.
    """

    def __init__(self, num_blocks: int, num_groups: int, enable_caching: bool = True) -> None:
        assert num_blocks > 1, "the pool needs the null block and at least one other"
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_cnt = 1  # never free
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.num_usable_blocks = num_blocks - 1
        self.enable_caching = enable_caching
        self.num_evictions = 0
        """Known prefixes lost to reuse of their block."""
        self.events: KVEventLog | None = None
        """Told what is forgotten, if anybody wants to know."""
        self._cached: list[dict[bytes, KVCacheBlock]] = [{} for _ in range(num_groups)]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.free_queue.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live requests hold."""
        return self.num_usable_blocks - self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_usable_blocks

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Hands out `count` blocks with one reference each; there must be enough free ones."""
        assert count <= self.num_free_blocks, f"{count} blocks of {self.num_free_blocks} free"
        blocks = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                self.uncache(block)
                self.num_evictions += 1
            block.ref_cnt = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to each block, taking it out of the free queue if it is there."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drops a reference to each block; those without any become free, in the given order."""
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
        """Makes a request's blocks `start` up to `end` known; returns those that now are.

        Where another block holds the same prefix already, that one stays the known one.
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
        """The blocks that hold a known prefix in this group, by its hash."""
        return self._cached[group_id]

    def uncache(self, block: KVCacheBlock) -> None:
        """Makes the prefix cache forget a block."""
        assert block.block_hash is not None
        del self._cached[block.group_id][block.block_hash]
        if self.events is not None and self.events.group_id == block.group_id:
            self.events.note_removed(block.block_hash)
        block.block_hash = None

    def forget_all(self) -> None:
        """Forgets all known prefixes; blocks that somebody holds are just that from now on."""
        for cached in self._cached:
            for block in list(cached.values()):
                self.uncache(block)
        if self.events is not None:
            self.events.note_cleared()

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Compares the books with one another and with the references that requests really hold.

        Args:
            ref_counts: for each block id the number of references to it.

        Raises:
            AssertionError: with what does not add up.
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
                    raise AssertionError(f"the prefix cache does not know {block}")
                if block.ref_cnt == 0 and not self.enable_caching:
                    raise AssertionError(f"{block} is kept though caching is off")
        if num_hashed != sum(map(len, self._cached)):
            raise AssertionError("the prefix cache knows blocks that do not know of it")
        null = self.null_block
        if null.ref_cnt != 1 or null.block_hash is not None or null.block_id in in_queue:
            raise AssertionError(f"the null block was used: {null}")
