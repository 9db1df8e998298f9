import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups, max_blocks_per_request
from octavo.kv_cache.hashing import make_block_hasher
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import Request
from tests.fakes import STATE, pages
from tests.kv_cache.test_events import Subscriber
from tests.params import core_params, core_request

BLOCK = 4


def make_manager(windows=(None,), num_blocks=20, enable_caching=True, states=()):
    groups = make_kv_cache_groups([*pages(*windows), *states])
    config = KVCacheConfig(num_blocks, BLOCK, groups, num_states=8)
    return KVCacheManager(config, enable_caching)


def make_request(request_id, tokens, *, hashed=True, salt=None, leader=None, **params):
    core = core_request(request_id, list(tokens), core_params(**params), cache_salt=salt)
    return Request(core, make_block_hasher(BLOCK) if hashed else None, leader=leader)


def admit(manager, request, num_new=None, *, end_step=True):
    """Start a request as the scheduler does; return its hit in tokens, or None."""
    hit, start = manager.get_computed_blocks(request)
    num_new = request.num_tokens - start if num_new is None else num_new
    if manager.allocate_slots(request, num_new, hit) is None:
        return None
    request.num_computed_tokens = start + num_new
    if end_step:
        assert manager.take_blocks_to_copy() == []
    return start


def advance(manager, request, num_new=1, tokens=()):
    """Continue a request, then append sampled tokens."""
    new = manager.allocate_slots(request, num_new)
    request.num_computed_tokens += num_new
    request.append_output_token_ids(list(tokens))
    return new


class TestAllocation:
    def test_blocks_grow_with_the_tokens(self):
        manager, request = make_manager(), make_request("a", range(6))
        assert admit(manager, request) == 0
        assert manager.get_block_ids(request) == [[1, 2]]
        for token in (6, 7):
            request.append_output_token_ids([token])
            assert advance(manager, request) == []
        request.append_output_token_ids([8])
        assert advance(manager, request) == [[3]]
        assert manager.get_block_ids(request) == [[1, 2, 3]]
        manager.check_integrity([request])
        manager.free(request)
        manager.check_integrity([])
        assert manager.num_used_blocks == 0

    def test_groups_get_different_blocks(self):
        manager, request = make_manager([None, 8]), make_request("a", range(6))
        admit(manager, request)
        first, second = manager.get_block_ids(request)
        assert len(first) == len(second) == 2
        assert not set(first) & set(second)

    def test_nothing_changes_if_there_are_too_few(self):
        manager = make_manager(num_blocks=5)
        a, b = make_request("a", range(12)), make_request("b", range(100, 108))
        admit(manager, a)
        assert admit(manager, b) is None
        manager.check_integrity([a])
        assert manager.num_used_blocks == 3
        assert advance(manager, a, 4) == [[4]]
        assert manager.allocate_slots(a, 1) is None
        manager.check_integrity([a])

    def test_a_new_request_needs_room_for_all_its_tokens(self):
        manager = make_manager(num_blocks=5)
        assert admit(manager, make_request("a", range(17)), num_new=4) is None
        assert admit(manager, make_request("b", range(16)), num_new=4) == 0

    def test_the_end_of_a_request_is_reused_first(self):
        manager = make_manager()
        request = make_request("a", range(12))
        admit(manager, request)
        manager.free(request)
        assert [b.block_id for b in manager.pool.free_queue.to_list()][-3:] == [3, 2, 1]


class TestPrefixHits:
    def test_whole_blocks_are_shared(self):
        manager = make_manager()
        a, b = make_request("a", range(10)), make_request("b", [*range(9), 99, 98])
        admit(manager, a)
        assert admit(manager, b) == 8
        ids_a, ids_b = manager.get_block_ids(a)[0], manager.get_block_ids(b)[0]
        assert ids_a[:2] == ids_b[:2]
        assert ids_a[2] != ids_b[2]
        manager.check_integrity([a, b])
        assert (manager.num_queries, manager.num_hits) == (21, 8)

    def test_also_within_a_step(self):
        manager = make_manager()
        a, b = make_request("a", range(10)), make_request("b", range(10))
        admit(manager, a, end_step=False)
        assert admit(manager, b) == 8

    def test_only_what_a_step_computes_is_known(self):
        manager = make_manager()
        a = make_request("a", range(16))
        admit(manager, a, num_new=9)
        assert manager.get_computed_blocks(make_request("b", range(16)))[1] == 8
        advance(manager, a, 7)
        assert manager.get_computed_blocks(make_request("b", range(17)))[1] == 16

    def test_drafts_and_unknown_tokens_are_not_known(self):
        manager = make_manager()
        a = make_request("a", range(7))
        admit(manager, a)
        manager.allocate_slots(a, 5)  # one token in flight and four drafts
        a.num_computed_tokens += 5
        assert manager.get_computed_blocks(make_request("b", range(12)))[1] == 4

    def test_generated_tokens_are_found(self):
        manager = make_manager()
        a = make_request("a", range(7))
        admit(manager, a)
        a.append_output_token_ids([7])
        advance(manager, a)
        manager.free(a)
        assert admit(manager, make_request("b", range(9))) == 8

    def test_they_survive_until_their_block_is_needed(self):
        manager = make_manager(num_blocks=6)
        a = make_request("a", range(8))
        admit(manager, a)
        manager.free(a)
        b = make_request("b", range(100, 116))
        admit(manager, b)
        assert manager.get_computed_blocks(make_request("c", range(9)))[1] == 4

    def test_salts_do_not_share(self):
        manager = make_manager()
        admit(manager, make_request("a", range(8), salt="x"))
        assert admit(manager, make_request("b", range(9), salt="y")) == 0
        assert admit(manager, make_request("c", range(9))) == 0
        assert admit(manager, make_request("d", range(9), salt="x")) == 8

    def test_requests_without_hashes_neither_give_nor_take(self):
        manager = make_manager()
        admit(manager, make_request("a", range(8), hashed=False))
        assert admit(manager, make_request("b", range(9))) == 0
        assert admit(manager, make_request("c", range(9), hashed=False)) == 0
        assert manager.num_queries == 9

    def test_prompt_logprobs_need_the_prompt_computed(self):
        manager = make_manager()
        admit(manager, make_request("a", range(8)))
        request = make_request("b", range(9), prompt_logprobs=1)
        assert admit(manager, request) == 0
        assert manager.num_queries == 8

    def test_hits_that_are_free_cannot_be_handed_out_too(self):
        manager = make_manager(num_blocks=5)
        a = make_request("a", range(16))
        admit(manager, a)
        manager.free(a)
        other = make_request("o", range(100, 104))
        admit(manager, other)
        # Three blocks of a's are left; all are hits, so none is left for the rest.
        assert admit(manager, make_request("b", range(13))) is None
        manager.check_integrity([other])

    def test_without_caching_live_requests_share(self):
        manager = make_manager(enable_caching=False)
        a, b = make_request("a", range(8)), make_request("b", range(9))
        admit(manager, a)
        assert admit(manager, b) == 8
        manager.free(a)
        manager.free(b)
        manager.check_integrity([])
        assert admit(manager, make_request("c", range(9))) == 0

    def test_reset(self):
        manager = make_manager()
        a = make_request("a", range(8))
        admit(manager, a)
        assert not manager.reset_prefix_cache()
        manager.free(a)
        assert manager.reset_prefix_cache()
        assert admit(manager, make_request("b", range(9))) == 0


class TestCopyOnWrite:
    def test_a_shared_block_is_copied(self):
        manager = make_manager()
        a, b = make_request("a", range(8)), make_request("b", range(8))
        admit(manager, a)
        assert admit(manager, b, end_step=False) == 7
        manager.check_integrity([a, b])
        assert manager.take_blocks_to_copy() == [(2, 3)]
        assert manager.take_blocks_to_copy() == []
        assert manager.get_block_ids(b) == [[1, 3]]
        manager.check_integrity([a, b])

    def test_the_source_is_kept_until_the_step_is_scheduled(self):
        manager = make_manager(num_blocks=5)
        a, b = make_request("a", range(8)), make_request("b", range(8))
        admit(manager, a)
        admit(manager, b, end_step=False)
        manager.free(a)  # cannot happen while scheduling, but shows which request holds the source
        assert admit(manager, make_request("c", range(100, 108)), end_step=False) is None
        manager.take_blocks_to_copy()
        assert manager.pool.num_free_blocks == 2

    def test_a_block_that_nobody_uses_is_taken_over(self):
        manager = make_manager(num_blocks=3)
        a, b, c = (make_request(i, range(8)) for i in "abc")
        admit(manager, a)
        manager.free(a)
        assert admit(manager, b) == 7
        assert manager.get_block_ids(b) == [[1, 2]]
        manager.check_integrity([b])
        manager.free(b)
        assert admit(manager, c) == 7

    def test_a_block_without_content_is_not_copied(self):
        manager = make_manager()
        a, b, c = (make_request(i, range(8)) for i in "abc")
        admit(manager, a, end_step=False)
        assert admit(manager, b, end_step=False) == 4
        assert manager.take_blocks_to_copy() == []
        assert admit(manager, c, end_step=False) == 7
        assert len(manager.take_blocks_to_copy()) == 1

    def test_a_block_taken_over_is_not_copied_in_the_same_step(self):
        manager = make_manager()
        a, b, c = (make_request(i, range(8)) for i in "abc")
        admit(manager, a)
        manager.free(a)
        assert admit(manager, b, end_step=False) == 7
        assert admit(manager, c) == 4
        manager.check_integrity([b, c])

    def test_what_others_make_known_in_the_step_does_not_matter(self):
        manager = make_manager()
        admit(manager, make_request("a", range(8)))
        admit(manager, make_request("other", range(50, 58)), end_step=False)
        assert admit(manager, make_request("b", range(8)), end_step=False) == 7
        assert len(manager.take_blocks_to_copy()) == 1

    def test_nor_is_one_whose_content_is_missing_in_one_group(self):
        manager = make_manager([None, 8])
        a, b, c = (make_request(i, range(8)) for i in "abc")
        admit(manager, a)
        manager.pool.uncache(manager.pool.blocks[manager.get_block_ids(a)[1][1]])
        assert admit(manager, b, end_step=False) == 4
        assert admit(manager, c) == 4
        manager.check_integrity([a, b, c])

    def test_each_group_copies_its_own(self):
        manager = make_manager([None, 8])
        a, b = make_request("a", range(8)), make_request("b", range(8))
        admit(manager, a)
        admit(manager, b, end_step=False)
        blocks_a, blocks_b = manager.get_block_ids(a), manager.get_block_ids(b)
        copies = [(x[1], y[1]) for x, y in zip(blocks_a, blocks_b, strict=True)]
        assert manager.take_blocks_to_copy() == copies

    def test_a_copy_needs_a_free_block(self):
        manager = make_manager(num_blocks=3)
        a, b = make_request("a", range(8)), make_request("b", range(8))
        admit(manager, a)
        assert admit(manager, b) is None
        manager.check_integrity([a])


class TestLeader:
    def test_the_last_block_is_copied_once_it_has_content(self):
        manager = make_manager()
        a = make_request("a", range(7))
        b, c = (make_request(i, range(7), leader=a) for i in "bc")
        admit(manager, a, end_step=False)
        assert manager.waits_for_leader(b)
        assert admit(manager, b, end_step=False) == 4  # it reuses the full block
        assert manager.take_blocks_to_copy() == []
        assert not manager.waits_for_leader(c)
        assert admit(manager, c, end_step=False) == 6
        assert manager.get_block_ids(c) == [[1, 4]]
        assert manager.take_blocks_to_copy() == [(2, 4)]
        manager.check_integrity([a, b, c])

    def test_one_that_was_just_admitted_again_has_no_content(self):
        manager = make_manager()
        a = make_request("a", range(7))
        admit(manager, a)
        a.append_output_token_ids([9, 9])
        advance(manager, a, 2)
        manager.free(a)
        a.num_computed_tokens = 0
        assert admit(manager, a, end_step=False) == 8
        b = make_request("b", range(7), leader=a)
        assert manager.waits_for_leader(b)
        assert admit(manager, b, end_step=False) == 4
        assert manager.take_blocks_to_copy() == []

    def test_a_prompt_that_is_half_computed_is_no_prompt(self):
        manager = make_manager()
        a = make_request("a", range(7))
        b = make_request("b", range(7), leader=a)
        admit(manager, a, 5)
        assert not manager.waits_for_leader(b)
        assert admit(manager, b) == 4

    def test_nothing_is_left_to_copy(self):
        manager = make_manager()
        a = make_request("a", range(5))
        b = make_request("b", range(5), leader=a)
        admit(manager, a, end_step=False)
        assert not manager.waits_for_leader(b)
        assert admit(manager, b) == 4
        manager.check_integrity([a, b])

    def test_prompt_logprobs_want_it_computed(self):
        manager = make_manager()
        a = make_request("a", range(7))
        b = make_request("b", range(7), leader=a, prompt_logprobs=1)
        admit(manager, a, end_step=False)
        assert not manager.waits_for_leader(b)
        assert admit(manager, b) == 0

    def test_a_state_cannot_be_cut_off(self):
        manager = make_manager(states=[STATE])
        a = make_request("a", range(3))
        b = make_request("b", range(3), leader=a)
        admit(manager, a, end_step=False)
        assert not manager.waits_for_leader(b)
        manager.take_blocks_to_copy()
        assert admit(manager, b) == 0


class TestSlidingWindow:
    def test_blocks_out_of_the_window_are_given_back(self):
        manager = make_manager([6])
        a = make_request("a", range(32), hashed=False)
        admit(manager, a, num_new=8)
        assert manager.get_block_ids(a) == [[1, 2]]
        advance(manager, a, 8)  # position 8 sees 3 to 7
        assert manager.get_block_ids(a)[0][:2] == [1, 2]
        advance(manager, a, 8)  # position 16 sees 11 to 15
        assert manager.get_block_ids(a)[0][:3] == [0, 0, 3]
        assert manager.num_used_blocks == 4
        manager.check_integrity([a])
        manager.free(a)
        manager.check_integrity([])

    def test_what_leaves_the_window_makes_room_at_once(self):
        manager = make_manager([4], num_blocks=3)
        a = make_request("a", range(4), hashed=False)
        admit(manager, a)
        for _ in range(20):
            advance(manager, a, 1, [7])
            manager.check_integrity([a])
        assert manager.num_used_blocks == 2

    def test_drafts_in_flight_may_take_it_back(self):
        """The blocks that it sees after a rejection of all drafts are kept, and free no memory."""
        manager = make_manager([4], num_blocks=5)
        a = make_request("a", range(16), hashed=False)
        admit(manager, a)
        a.append_output_token_ids([7])
        advance(manager, a, 5)
        a.num_spec_in_flight = 4  # it may be at 17 to 21, and sees from 14 on
        advance(manager, a, 5)
        assert manager.get_block_ids(a)[0][:4] == [0, 0, 0, 4]
        a.num_spec_in_flight = 8  # at 18 to 26, and sees from 15 on
        assert manager.allocate_slots(a, 5) is None
        manager.check_integrity([a])
        a.num_spec_in_flight = 0  # all were right
        assert advance(manager, a, 5) != [[]]
        assert manager.get_block_ids(a)[0][:5] == [0] * 5
        manager.check_integrity([a])

    def test_a_shared_block_does_not_make_room(self):
        manager = make_manager([4], num_blocks=4)
        a, b = make_request("a", range(8)), make_request("b", range(9))
        admit(manager, a)
        assert admit(manager, b) == 8
        assert manager.get_block_ids(b) == [[0, 2, 3]]
        a.append_output_token_ids([50] * 8)
        assert advance(manager, a, 4) == [[1]]  # its own first block, out of the window
        assert manager.allocate_slots(a, 4) is None  # its second block is also one of b
        manager.check_integrity([a, b])
        manager.free(b)
        assert advance(manager, a, 4) == [[3]]
        manager.check_integrity([a])

    def test_a_hit_needs_only_the_window(self):
        manager = make_manager([6])
        a = make_request("a", range(17))
        admit(manager, a, num_new=16)
        advance(manager, a, 1)
        b = make_request("b", range(17))
        hit, start = manager.get_computed_blocks(b)
        assert start == 16
        assert [block.block_id for block in hit.blocks[0]] == [0, 0, 3, 4]

    def test_a_hole_before_the_end_shortens_the_hit(self):
        manager = make_manager([6])
        a = make_request("a", range(17))
        admit(manager, a)
        blocks = manager.pool.blocks
        manager.pool.uncache(blocks[3])  # positions 8 to 11
        hit, start = manager.get_computed_blocks(make_request("b", range(17)))
        assert start == 8
        assert [block.block_id for block in hit.blocks[0]] == [1, 2][-len(hit.blocks[0]) :]

    def test_copying_the_last_block_needs_one_more_position(self):
        # Window 5: token 8 sees 4 to 7, one block; token 7, computed again, sees 3 to 6.
        manager = make_manager([5])
        a = make_request("a", range(8))
        admit(manager, a)
        manager.pool.uncache(manager.pool.blocks[1])
        assert manager.get_computed_blocks(make_request("b", range(9)))[1] == 8
        assert manager.get_computed_blocks(make_request("c", range(8)))[1] == 0

    def test_groups_agree_on_the_hit(self):
        manager = make_manager([None, 5])
        a = make_request("a", range(17))
        admit(manager, a)
        full, sliding = manager.get_block_ids(a)
        b = make_request("b", range(17))
        assert manager.get_computed_blocks(b)[1] == 16
        manager.pool.uncache(manager.pool.blocks[full[2]])
        assert manager.get_computed_blocks(b)[1] == 8
        manager.pool.uncache(manager.pool.blocks[sliding[1]])
        hit, start = manager.get_computed_blocks(b)
        assert start == 4
        assert [[block.block_id for block in blocks] for blocks in hit.blocks] == [
            full[:1],
            sliding[:1],
        ]
        manager.pool.uncache(manager.pool.blocks[sliding[0]])
        assert manager.get_computed_blocks(b)[1] == 0

    def test_two_windows_are_asked_until_they_agree(self):
        manager = make_manager([5, 9])
        a = make_request("a", range(17))
        admit(manager, a)
        short, long = manager.get_block_ids(a)
        manager.pool.uncache(manager.pool.blocks[long[3]])  # long ends after block 2
        manager.pool.uncache(manager.pool.blocks[short[2]])  # short then after 1, long agrees
        assert manager.get_computed_blocks(make_request("b", range(17)))[1] == 8
        manager.pool.uncache(manager.pool.blocks[long[0]])
        assert manager.get_computed_blocks(make_request("b", range(17)))[1] == 0


class TestIntegrity:
    @pytest.fixture
    def admitted(self):
        manager, request = make_manager(), make_request("a", range(10))
        admit(manager, request)
        manager.check_integrity([request])
        return manager, request

    def test_a_request_that_is_gone(self, admitted):
        manager, _ = admitted
        with pytest.raises(AssertionError, match="held by"):
            manager.check_integrity([])

    def test_a_wrong_reference(self, admitted):
        manager, request = admitted
        manager.pool.touch([manager.pool.blocks[1]])
        with pytest.raises(AssertionError, match="1 real references"):
            manager.check_integrity([request])

    def test_a_wrong_hash(self, admitted):
        manager, request = admitted
        request.block_hashes[0] = b"x"
        with pytest.raises(AssertionError, match="known as something else"):
            manager.check_integrity([request])

    def test_a_known_block_that_will_be_written(self, admitted):
        manager, request = admitted
        request.num_computed_tokens = 7
        with pytest.raises(AssertionError, match="not full"):
            manager.check_integrity([request])

    def test_a_shared_block_that_will_be_written(self, admitted):
        manager, request = admitted
        manager.pool.touch([manager.pool.blocks[3]])
        with pytest.raises(AssertionError, match="yet to be written"):
            manager.check_integrity([request])

    @pytest.mark.parametrize(
        ("computed", "sound"),
        [(8, False), (12, False), (13, True), (16, True)],
    )
    def test_a_window_that_has_lost_a_block_it_still_sees(self, computed, sound):
        manager = make_manager([6])
        request = make_request("a", range(32), hashed=False)
        admit(manager, request, num_new=16)
        advance(manager, request, 1)
        assert manager.get_block_ids(request)[0][:3] == [0, 0, 3]  # position 16 sees 11 to 15
        request.num_computed_tokens = computed  # position 12 would see 7
        if sound:
            manager.check_integrity([request])
        else:
            with pytest.raises(AssertionError, match="of group 0 is"):
                manager.check_integrity([request])

    def test_a_block_is_full_at_its_last_token(self, admitted):
        manager, request = admitted
        request.num_computed_tokens = 8
        manager.check_integrity([request])
        manager.pool.touch([manager.pool.blocks[2]])  # a full block may be shared
        other = make_request("b", range(8))
        with pytest.raises(AssertionError, match="held by"):
            manager.check_integrity([request, other])

    def test_the_end_of_what_there_is_may_be_shared(self, admitted):
        manager, request = admitted
        manager.free(request)
        request = make_request("c", range(200, 208))
        admit(manager, request)
        other = make_request("d", range(200, 209))
        assert admit(manager, other) == 8
        manager.check_integrity([request, other])  # the next block to write is not allocated yet

    def test_too_few_slots(self, admitted):
        manager, request = admitted
        request.num_computed_tokens = 12
        manager.check_integrity([request])
        request.num_computed_tokens = 13
        with pytest.raises(AssertionError, match="13 tokens in 12 slots"):
            manager.check_integrity([request])


MAX_STEP = 9
KINDS = st.sampled_from([*pages(None, 1, 6), STATE])


class ManagerMachine(RuleBasedStateMachine):
    """Requests start, continue and end in any order, with any kinds of cache."""

    @initialize(
        caches=st.lists(KINDS, max_size=3),
        num_blocks=st.integers(8, 30),
        caching=st.booleans(),
        num_states=st.integers(1, 9),
    )
    def make(self, caches, num_blocks, caching, num_states):
        self.groups = make_kv_cache_groups([*caches, *pages(None)])
        config = KVCacheConfig(num_blocks, BLOCK, self.groups, num_states)
        self.num_paged = len(config.paged_groups)
        self.events_group = self.num_paged - 1
        events = KVEventLog(self.events_group, BLOCK, "CPU")
        self.manager = KVCacheManager(config, caching, events)
        self.subscriber = Subscriber()
        self.live = {}
        self.num_started = 0

    def books(self):
        pool, live = self.manager.pool, self.live.values()
        known = [dict(pool.cached_blocks(group)) for group in range(self.num_paged)]
        return pool.free_queue.to_list(), known, [self.manager.get_block_ids(r) for r in live]

    def allocate(self, request, start, num_new, hit=None):
        """Return whether the allocation succeeded; a failed one changes nothing."""
        before = self.books()
        end = start + num_new
        new = self.manager.allocate_slots(request, num_new, hit)
        if new is not None:
            request.num_computed_tokens = end
            return True
        assert self.books() == before
        most = max_blocks_per_request(self.groups, BLOCK, request.num_tokens, MAX_STEP)
        others = self.live.keys() - {request.request_id}
        pinned = self.manager.states is not None and self.manager.states.num_pinned
        blocked = self.manager._copies or pinned
        assert others or blocked or most > self.manager.pool.num_usable_blocks
        return False

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 30),
        num_new=st.integers(1, MAX_STEP),
        hashed=st.sampled_from([True, True, False]),
    )
    def start(self, family, length, num_new, hashed):
        self.num_started += 1
        request = make_request(f"r{self.num_started}", [family] * length, hashed=hashed)
        hit, start = self.manager.get_computed_blocks(request)
        assert start < request.num_tokens
        if self.allocate(request, start, min(num_new, request.num_tokens - start), hit):
            self.live[request.request_id] = request

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, MAX_STEP))
    def go_on(self, data, num_new):
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == 64:
                return
            request.append_output_token_ids([request.all_token_ids[0]])
        num_new = min(num_new, request.num_tokens - request.num_computed_tokens)
        self.allocate(request, request.num_computed_tokens, num_new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        self.manager.free(self.live.pop(data.draw(st.sampled_from(sorted(self.live)))))

    @rule()
    def end_step(self):
        self.manager.take_blocks_to_copy()

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()

    @invariant()
    def books_agree(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity(self.live.values())
        self.subscriber.take(self.manager.pool.events.take())
        assert self.subscriber.known == set(self.manager.pool.cached_blocks(self.events_group))
        for request in self.live.values():
            held = sum(block > 0 for ids in self.manager.get_block_ids(request) for block in ids)
            assert held <= max_blocks_per_request(self.groups, BLOCK, request.num_tokens, MAX_STEP)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
