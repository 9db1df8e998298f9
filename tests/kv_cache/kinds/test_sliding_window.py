import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv_cache.kinds.sliding_window import SlidingWindowManager


@pytest.mark.parametrize(
    ("window", "computed", "first"), [(8, 0, 0), (8, 10, 0), (8, 11, 1), (8, 100, 23), (1, 7, 1)]
)
def test_first_needed_block(window, computed, first):
    assert SlidingWindowManager(4, window).first_needed_block(computed) == first


def test_a_hit_needs_the_window_before_its_end():
    manager, hashes = SlidingWindowManager(4, 6), [b"a", b"b", b"c", b"d"]
    assert manager.longest_hit(hashes, 17, {b"c", b"d"}) == 4  # position 16 sees 11 to 15
    assert manager.longest_hit(hashes, 17, {b"a", b"b", b"d"}) == 2
    assert manager.longest_hit(hashes, 17, {b"b", b"d"}) == 0
    # Position 15, computed again, sees 10 to 14; position 7 sees 2 to 6.
    assert manager.longest_hit(hashes, 16, {b"c", b"d"}) == 4
    assert manager.longest_hit(hashes[:2], 8, {b"b"}) == 0


def test_a_step_is_what_there_must_be_room_for():
    assert SlidingWindowManager(16, 8).num_blocks_to_admit(32, 1000) == 2


def test_max_blocks():
    manager = SlidingWindowManager(16, 32)
    assert manager.max_blocks(1000, 64) == 7  # 95 positions in 6 blocks + 1
    assert manager.max_blocks(50, 64) == 4


@settings(deadline=None)
@given(
    window=st.integers(1, 60),
    block_size=st.sampled_from([8, 16]),
    budget=st.integers(1, 40),
    length=st.integers(1, 200),
    data=st.data(),
)
def test_no_schedule_needs_more_than_the_maximum(window, block_size, budget, length, data):
    manager = SlidingWindowManager(block_size, window)
    most = manager.max_blocks(length, budget)
    done = 0
    while done < length:
        step = min(data.draw(st.integers(1, budget)), length - done)
        assert manager.num_blocks(done + step) - manager.first_needed_block(done) <= most
        done += step
