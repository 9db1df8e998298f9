from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv_cache.groups import (
    KVCacheConfig,
    KVCacheGroup,
    bytes_per_block,
    find_full_attention,
    make_kv_cache_groups,
    max_blocks_per_request,
    slot_nbytes,
    state_nbytes,
)
from octavo.models.cache import AttentionCache, LatentCache
from octavo.models.state_cache import StateCache


def caches(windows):
    return [AttentionCache(2, 64, window) for window in windows]


def test_equal_caches_are_one_group():
    full, local = caches([None, 64])
    assert make_kv_cache_groups([full] * 3) == [KVCacheGroup((0, 1, 2), full)]
    assert make_kv_cache_groups([local] * 2) == [KVCacheGroup((0, 1), local)]


def test_gemma2_alternates():
    local, full = caches([4096, None])
    groups = make_kv_cache_groups([local, full] * 3)
    assert groups == [KVCacheGroup((0, 2, 4), local), KVCacheGroup((1, 3, 5), full)]
    assert len(KVCacheConfig(2, 16, groups).tensor_sizes("float32")) == 3


def test_gemma3_has_five_local_layers_for_each_global_one():
    local, full = caches([512, None])
    groups = make_kv_cache_groups([full if (i + 1) % 6 == 0 else local for i in range(26)])
    assert [len(g.layer_indices) for g in groups] == [4, 4, 4, 4, 4, 2, 4]
    assert [g.cache for g in groups] == [local] * 6 + [full]


def test_the_largest_group_says_how_many_tensors_there_are():
    groups = make_kv_cache_groups(caches([8, None, None]))
    assert [len(g.layer_indices) for g in groups] == [1, 1, 1]
    groups = [KVCacheGroup((0,), groups[0].cache), KVCacheGroup((1, 2), groups[1].cache)]
    assert len(KVCacheConfig(2, 16, groups).tensor_sizes("float32")) == 2


@settings(deadline=None)
@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=40))
def test_layers_of_a_tensor_are_in_different_groups(windows):
    groups = make_kv_cache_groups(caches(windows))
    config = KVCacheConfig(2, 16, groups)
    places = list(zip(config.layer_to_group, config.layer_to_tensor, strict=True))
    assert len(set(places)) == len(windows)
    for cache, (group, tensor) in zip(caches(windows), places, strict=True):
        assert groups[group].cache == cache
        assert 0 <= tensor < len(config.tensor_sizes("float32"))
    # The smallest kind fills its group; nothing is split more than it must be.
    size = len(config.tensor_sizes("float32"))
    assert size == min(windows.count(w) for w in windows)
    assert len(groups) == sum(-(-windows.count(w) // size) for w in set(windows))


def test_bytes_per_block():
    groups = make_kv_cache_groups(caches([None, 8] * 4))
    assert bytes_per_block(groups, 16, "bfloat16") == 4 * 16 * 2 * 64 * 2 * 2
    assert bytes_per_block(groups, 16, "int8") == 4 * 16 * 2 * (64 + 4) * 2


def test_blocks_of_different_sizes_share_a_tensor():
    same = make_kv_cache_groups([AttentionCache(2, 64), AttentionCache(4, 32, 8)])
    assert bytes_per_block(same, 16, "float32") == 16 * 2 * 64 * 2 * 4
    assert slot_nbytes(same, 128, "int8") == [36864]  # more scales in the second layer


def test_latents_are_full_attention():
    groups = make_kv_cache_groups([AttentionCache(2, 64, 8), LatentCache(36)])
    assert find_full_attention(groups) == 1
    assert max_blocks_per_request(groups[1:], 16, 100, 64) == 7


def test_max_blocks_per_request():
    full, sliding = make_kv_cache_groups(caches([None, 32]))
    assert max_blocks_per_request([full], 16, 100, 64) == 7
    assert max_blocks_per_request([sliding], 16, 1000, 64) == 7
    (state,) = make_kv_cache_groups([StateCache(((8,),))])
    assert max_blocks_per_request([full, sliding, sliding, state], 16, 1000, 64) == 63 + 7 + 7


def test_states_have_tensors_of_their_own():
    """One group, after the others; its layers share no tensor with blocks."""
    state, full, local = StateCache(((3, 8), (5,))), *caches([None, 8])
    assert state.nbytes == (32 + 16) * 4  # each array begins at a cache line
    groups = make_kv_cache_groups([state, full, state, state, local])
    assert groups[2] == KVCacheGroup((0, 2, 3), state)
    config = KVCacheConfig(5, 16, groups, num_states=7)
    assert config.paged_groups == groups[:2]
    assert config.layer_to_group == [2, 0, 2, 2, 1]
    assert config.layer_to_tensor == [1, 0, 2, 3, 0]
    block = full.block_nbytes(16, "float32")
    assert config.tensor_sizes("float32") == [(5, block)] + [(7, 192)] * 3
    assert state_nbytes(groups) == 3 * 192
    assert make_kv_cache_groups([state]) == [KVCacheGroup((0,), state)]
