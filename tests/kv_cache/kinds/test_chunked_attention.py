import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv_cache.kinds.chunked_attention import ChunkedAttentionManager


@pytest.mark.parametrize(
    ("chunk", "computed", "first"), [(8, 0, 0), (8, 7, 0), (8, 8, 2), (8, 100, 24), (6, 11, 1)]
)
def test_first_needed_block(chunk, computed, first):
    assert ChunkedAttentionManager(4, chunk).first_needed_block(computed) == first


def test_a_hit_needs_the_chunk_of_the_next_token():
    manager, hashes = ChunkedAttentionManager(4, 6), [b"a", b"b", b"c", b"d"]
    assert manager.longest_hit(hashes, 17, {b"d"}) == 4  # position 16 sees 12 to 15
    assert manager.longest_hit(hashes, 17, {b"b", b"c"}) == 3  # position 12 sees none before it
    assert manager.longest_hit(hashes[:3], 11, {b"b"}) == 2  # position 8 sees 6 and 7
    assert manager.longest_hit(hashes[:2], 9, {b"a"}) == 1
    assert manager.longest_hit(hashes[:1], 5, {b"b"}) == 0
    assert manager.longest_hit(hashes, 16, {b"d"}) == 4  # position 15, computed again
    assert ChunkedAttentionManager(4, 8).longest_hit(hashes[:2], 9, set()) == 2


def test_a_step_is_what_there_must_be_room_for():
    assert ChunkedAttentionManager(16, 8).num_blocks_to_admit(32, 1000) == 2


@settings(deadline=None)
@given(
    chunk=st.integers(1, 60),
    block_size=st.sampled_from([8, 16]),
    budget=st.integers(1, 40),
    length=st.integers(1, 200),
    data=st.data(),
)
def test_no_schedule_needs_more_than_the_maximum(chunk, block_size, budget, length, data):
    manager = ChunkedAttentionManager(block_size, chunk)
    most = manager.max_blocks(length, budget)
    done = 0
    while done < length:
        step = min(data.draw(st.integers(1, budget)), length - done)
        assert manager.num_blocks(done + step) - manager.first_needed_block(done) <= most
        done += step
