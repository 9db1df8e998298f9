import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv_cache.groups import (
    KVCacheConfig,
    KVCacheGroup,
    bytes_per_block,
    make_kv_cache_groups,
    max_blocks_per_request,
)


def test_one_kind_is_one_group():
    assert make_kv_cache_groups([None] * 3) == ([KVCacheGroup((0, 1, 2), None)], 3)
    assert make_kv_cache_groups([64] * 2) == ([KVCacheGroup((0, 1), 64)], 2)


def test_gemma2_alternates():
    groups, size = make_kv_cache_groups([4096, None] * 3)
    assert groups == [KVCacheGroup((0, 2, 4), 4096), KVCacheGroup((1, 3, 5), None)]
    assert size == 3


def test_gemma3_has_five_local_layers_for_each_global_one():
    windows = [None if (i + 1) % 6 == 0 else 512 for i in range(26)]
    groups, size = make_kv_cache_groups(windows)
    assert size == 4
    assert [len(g.layer_indices) for g in groups] == [4, 4, 4, 4, 4, 2, 4]
    assert [g.sliding_window for g in groups] == [512] * 6 + [None]


@settings(deadline=None)
@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=40))
def test_layers_of_a_tensor_are_in_different_groups(windows):
    groups, size = make_kv_cache_groups(windows)
    config = KVCacheConfig(2, 16, groups, size, 1)
    assert config.num_layers == len(windows)
    places = list(zip(config.layer_to_group, config.layer_to_tensor, strict=True))
    assert len(set(places)) == len(windows)
    for window, (group, tensor) in zip(windows, places, strict=True):
        assert groups[group].sliding_window == window
        assert 0 <= tensor < size
    # The smallest kind fills its group; nothing is split more than it must be.
    assert len(groups) == sum(-(-windows.count(w) // size) for w in set(windows))


def test_bytes_per_block():
    assert bytes_per_block(4, 16, 2, 64, "bfloat16") == 4 * 16 * 2 * 64 * 2 * 2
    assert bytes_per_block(4, 16, 2, 64, "fp8_e4m3") == 4 * 16 * 2 * 64 * 2
    assert bytes_per_block(4, 16, 2, 64, "int8") == 4 * 16 * 2 * (64 + 4) * 2


@pytest.mark.parametrize(
    ("window", "computed", "first"),
    [(None, 100, 0), (8, 0, 0), (8, 7, 0), (8, 8, 1), (8, 100, 93), (1, 5, 5)],
)
def test_first_needed_position(window, computed, first):
    assert KVCacheGroup((0,), window).first_needed_position(computed) == first


def test_max_blocks_per_request():
    full, sliding = KVCacheGroup((0,)), KVCacheGroup((1,), 32)
    assert max_blocks_per_request([full], 16, 100, 64) == 7
    assert max_blocks_per_request([sliding], 16, 1000, 64) == 7  # 95 positions in 6 blocks + 1
    assert max_blocks_per_request([sliding], 16, 50, 64) == 4
    assert max_blocks_per_request([full, sliding, sliding], 16, 1000, 64) == 63 + 7 + 7


@settings(deadline=None)
@given(
    window=st.integers(1, 60),
    block_size=st.sampled_from([8, 16]),
    budget=st.integers(1, 40),
    length=st.integers(1, 200),
    data=st.data(),
)
def test_no_schedule_needs_more_than_the_maximum(window, block_size, budget, length, data):
    group = KVCacheGroup((0,), window)
    most = max_blocks_per_request([group], block_size, length, budget)
    done = 0
    while done < length:
        step = min(data.draw(st.integers(1, budget)), length - done)
        first = group.first_needed_position(done) // block_size
        assert -(-(done + step) // block_size) - first <= most
        done += step
