from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def ids(blocks):
    return [block.block_id for block in blocks]


class TestFreeQueue:
    def test_order(self):
        blocks = [KVCacheBlock(i) for i in range(5)]
        queue = FreeKVCacheBlockQueue(blocks)
        assert queue.popleft() is blocks[0]
        queue.remove(blocks[2])
        queue.append(blocks[0])
        queue.appendleft(blocks[2])
        assert ids(queue.to_list()) == [2, 1, 3, 4, 0]
        assert queue.num_free_blocks == 5
        queue.remove(blocks[0])
        queue.remove(blocks[2])
        assert ids(queue.to_list()) == [1, 3, 4]

    def test_empty(self):
        queue = FreeKVCacheBlockQueue([])
        assert queue.to_list() == []
        with pytest.raises(AssertionError, match="no free block"):
            queue.popleft()

    def test_a_block_is_in_it_once(self):
        block = KVCacheBlock(1)
        queue = FreeKVCacheBlockQueue([block])
        with pytest.raises(AssertionError, match="already"):
            queue.append(block)
        queue.remove(block)
        with pytest.raises(AssertionError, match="not in the free queue"):
            queue.remove(block)

    def test_broken_links_are_found(self):
        blocks = [KVCacheBlock(i) for i in range(3)]
        queue = FreeKVCacheBlockQueue(blocks)
        blocks[1].prev_free = blocks[2]
        with pytest.raises(AssertionError, match="broken"):
            queue.to_list()


class TestBlockPool:
    def test_the_null_block_is_never_handed_out(self):
        pool = BlockPool(5, 1)
        assert sorted(ids(pool.get_new_blocks(4))) == [1, 2, 3, 4]
        with pytest.raises(AssertionError, match="1 blocks of 0 free"):
            pool.get_new_blocks(1)
        pool.touch([pool.null_block])
        pool.free_blocks([pool.null_block] * 3)
        assert pool.null_block.ref_cnt == 1
        assert pool.num_free_blocks == 0
        assert pool.usage == 1.0

    def test_a_block_is_not_freed_twice(self):
        pool = BlockPool(3, 1)
        blocks = pool.get_new_blocks(1)
        pool.free_blocks(blocks)
        with pytest.raises(AssertionError, match="freed twice"):
            pool.free_blocks(blocks)

    def test_cached_blocks_are_reused_last_and_oldest_first(self):
        pool = BlockPool(7, 1)
        blocks = pool.get_new_blocks(6)
        pool.cache_full_blocks(blocks, [bytes([i]) for i in range(6)], 1, 4, 0)
        pool.free_blocks(reversed(blocks))
        # Blocks 0, 4, 5 have no known content; of the others the last one was freed first.
        order = [pool.get_new_blocks(1)[0] for _ in range(6)]
        assert set(order[:3]) == {blocks[0], blocks[4], blocks[5]}
        assert order[3:] == [blocks[3], blocks[2], blocks[1]]
        assert pool.num_evictions == 3
        assert pool.cached_blocks(0).get(bytes([2])) is None

    def test_a_hit_saves_a_free_block(self):
        pool = BlockPool(4, 1)
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(blocks, [b"a", b"b", b"c"], 0, 3, 0)
        pool.free_blocks(blocks)
        hit = pool.cached_blocks(0).get(b"b")
        assert hit is blocks[1]
        pool.touch([hit])
        pool.touch([hit])
        assert (hit.ref_cnt, pool.num_free_blocks) == (2, 2)
        assert hit not in pool.get_new_blocks(2)
        pool.free_blocks([hit])
        assert pool.num_free_blocks == 0
        pool.free_blocks([hit])
        assert pool.num_free_blocks == 1

    def test_groups_know_blocks_on_their_own(self):
        pool = BlockPool(3, 2)
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(blocks[:1], [b"a"], 0, 1, 0)
        assert pool.cached_blocks(1).get(b"a") is None
        pool.cache_full_blocks(blocks[1:], [b"a"], 0, 1, 1)
        assert pool.cached_blocks(0).get(b"a") is blocks[0]
        assert pool.cached_blocks(1).get(b"a") is blocks[1]
        pool.uncache(blocks[0])
        assert pool.cached_blocks(1).get(b"a") is blocks[1]

    def test_the_first_block_of_a_prefix_stays_the_known_one(self):
        pool = BlockPool(3, 1)
        blocks = pool.get_new_blocks(2)
        assert pool.cache_full_blocks(blocks[:1], [b"a"], 0, 1, 0) == blocks[:1]
        assert pool.cache_full_blocks(blocks[1:], [b"a"], 0, 1, 0) == []
        assert blocks[1].block_hash is None
        assert pool.cached_blocks(0).get(b"a") is blocks[0]

    def test_without_caching_a_prefix_lives_as_long_as_its_users(self):
        pool = BlockPool(3, 1, enable_caching=False)
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(blocks, [b"a"], 0, 1, 0)
        pool.touch(blocks)
        pool.free_blocks(blocks)
        assert pool.cached_blocks(0).get(b"a") is blocks[0]
        pool.free_blocks(blocks)
        assert pool.cached_blocks(0).get(b"a") is None

    def test_what_is_forgotten_stays_with_who_has_it(self):
        pool = BlockPool(3, 1)
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(blocks, [b"a"], 0, 1, 0)
        pool.forget_all()
        assert pool.cached_blocks(0).get(b"a") is None
        pool.check_integrity([1 if b is blocks[0] else 0 for b in pool.blocks])
        pool.free_blocks(blocks)
        pool.check_integrity([0] * 3)

    def test_forgotten_blocks_are_reused_before_new_ones(self):
        pool = BlockPool(5, 1)
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(blocks, [b"a", b"b"], 0, 2, 0)
        pool.free_blocks(blocks)
        assert not {*ids(pool.free_queue.to_list()[:2])} & {*ids(blocks)}
        pool.forget_all()
        assert {*ids(pool.get_new_blocks(2))} == {*ids(blocks)}


class TestIntegrity:
    def pool(self):
        pool = BlockPool(5, 1)
        self.blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(self.blocks, [b"a", b"b"], 0, 2, 0)
        pool.free_blocks(self.blocks[:1])
        pool.check_integrity([0, 0, 1, 0, 0])
        return pool

    def test_a_leak(self):
        with pytest.raises(AssertionError, match="0 real references"):
            self.pool().check_integrity([0] * 5)

    def test_a_free_block_in_use(self):
        pool = self.pool()
        pool.free_queue.append(self.blocks[1])
        with pytest.raises(AssertionError, match="both free and in use"):
            pool.check_integrity([0, 0, 1, 0, 0])

    def test_a_lost_block(self):
        pool = self.pool()
        pool.free_queue.remove(self.blocks[0])
        with pytest.raises(AssertionError, match="lost"):
            pool.check_integrity([0, 0, 1, 0, 0])

    def test_a_wrong_count(self):
        pool = self.pool()
        pool.free_queue.num_free_blocks += 1
        with pytest.raises(AssertionError, match="counted as 4"):
            pool.check_integrity([0, 0, 1, 0, 0])

    def test_a_hash_that_the_cache_does_not_know(self):
        pool = self.pool()
        self.blocks[0].block_hash = b"c"
        with pytest.raises(AssertionError, match="does not list"):
            pool.check_integrity([0, 0, 1, 0, 0])

    def test_a_cached_block_without_hash(self):
        pool = self.pool()
        self.blocks[0].block_hash = None
        with pytest.raises(AssertionError, match="blocks without a hash"):
            pool.check_integrity([0, 0, 1, 0, 0])

    def test_a_used_null_block(self):
        pool = self.pool()
        pool.null_block.ref_cnt = 2
        with pytest.raises(AssertionError, match="null block"):
            pool.check_integrity([0, 0, 1, 0, 0])


class PoolMachine(RuleBasedStateMachine):
    """Pool against a plain model: references, known prefixes, order of reuse."""

    @initialize(num_blocks=st.integers(2, 8), caching=st.booleans())
    def start(self, num_blocks, caching):
        self.pool = BlockPool(num_blocks, 2, caching)
        self.caching = caching
        self.refs = Counter()
        self.known = {}  # (group, hash) -> block id
        self.free = list(range(1, num_blocks))

    @rule(data=st.data())
    def get(self, data):
        count = data.draw(st.integers(0, len(self.free)))
        got = ids(self.pool.get_new_blocks(count))
        assert got == self.free[:count]
        del self.free[:count]
        self.refs.update(got)
        self.known = {k: b for k, b in self.known.items() if b not in got}

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def drop(self, data):
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.free_blocks([self.pool.blocks[block]])
        self.refs[block] -= 1
        if not self.refs[block]:
            is_known = block in self.known.values()
            if is_known and self.caching:
                self.free.append(block)
            else:
                self.known = {k: b for k, b in self.known.items() if b != block}
                self.free.insert(0, block)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data(), group=st.integers(0, 1), block_hash=st.sampled_from([b"a", b"b", b"c"]))
    def make_known(self, data, group, block_hash):
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.cache_full_blocks([self.pool.blocks[block]], [block_hash], 0, 1, group)
        if (group, block_hash) not in self.known and block not in self.known.values():
            self.known[group, block_hash] = block

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def hit(self, data):
        group, block_hash = data.draw(st.sampled_from(sorted(self.known)))
        block = self.pool.cached_blocks(group).get(block_hash)
        assert block.block_id == self.known[group, block_hash]
        self.pool.touch([block])
        self.refs[block.block_id] += 1
        if block.block_id in self.free:
            self.free.remove(block.block_id)

    @rule()
    def reset(self):
        self.pool.forget_all()
        for _, block in sorted(self.known.items(), key=lambda item: item[0][0]):
            if block in self.free:
                self.free.remove(block)
                self.free.insert(0, block)
        self.known = {}

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([self.refs[b.block_id] for b in self.pool.blocks])
        assert ids(self.pool.free_queue.to_list()) == self.free
        for group in (0, 1):
            for block_hash in (b"a", b"b", b"c"):
                block = self.pool.cached_blocks(group).get(block_hash)
                expected = self.known.get((group, block_hash))
                assert (block.block_id if block else None) == expected


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
