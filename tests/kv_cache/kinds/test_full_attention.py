from octavo.kv_cache.kinds.full_attention import FullAttentionManager

MANAGER = FullAttentionManager(16)
HASHES = [b"a", b"b", b"c"]


def test_a_hit_ends_where_the_first_block_is_missing():
    assert MANAGER.longest_hit(HASHES, 100, {b"a", b"b", b"c"}) == 3
    assert MANAGER.longest_hit(HASHES, 100, {b"a", b"c"}) == 1
    assert MANAGER.longest_hit(HASHES, 100, {b"b", b"c"}) == 0
    assert MANAGER.longest_hit([], 0, {b"a"}) == 0


def test_pages_are_kept_to_the_end():
    assert [MANAGER.num_blocks(n) for n in (1, 16, 17)] == [1, 1, 2]
    assert [MANAGER.num_full_blocks(n) for n in (0, 15, 16, 33)] == [0, 0, 1, 2]
    assert MANAGER.first_needed_block(1000) == 0
    assert MANAGER.max_blocks(100, 8) == 7


def test_there_must_be_room_for_all_known_tokens():
    assert MANAGER.num_blocks_to_admit(8, 100) == 7
    assert MANAGER.num_blocks_to_admit(120, 100) == 8  # with lookahead slots
