"""Events of the prefix cache for subscribers; test_manager.py checks that none is missing."""

import msgspec

from octavo.kv_cache.events import (
    AllBlocksCleared,
    AnyKVEvent,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
)
from octavo.kv_cache.hashing import hash_block, root_hash


class Subscriber:
    """Subscriber that reconstructs the cache of an engine from its events."""

    def __init__(self):
        self.known = set()

    def take(self, events: list[AnyKVEvent]):
        for event in events:
            match event:
                case BlockStored():
                    assert not self.known & set(event.block_hashes)
                    self.known |= set(event.block_hashes)
                    self.check(event)
                case BlockRemoved():
                    assert self.known >= set(event.block_hashes)
                    self.known -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.known.clear()

    def check(self, event):
        """Check that a block's hash is that of its tokens after its parent's."""
        parent, size = event.parent_block_hash or root_hash(None), event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block_hash in enumerate(event.block_hashes):
            parent = hash_block(parent, event.token_ids[i * size : (i + 1) * size])
            assert parent == block_hash


def test_blocks_in_a_row_are_one_event():
    log = KVEventLog(0, 2, "CPU")
    log.note_stored(b"a", None, [1, 2])
    log.note_stored(b"b", b"a", [3, 4])
    log.note_stored(b"c", None, [5, 6])
    log.note_removed(b"a")
    log.note_removed(b"b")
    log.note_stored(b"a", None, [1, 2])
    assert log.take() == [
        BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2, None, "CPU"),
        BlockStored([b"c"], None, [5, 6], 2, None, "CPU"),
        BlockRemoved([b"a", b"b"], "CPU"),
        BlockStored([b"a"], None, [1, 2], 2, None, "CPU"),
    ]
    assert log.take() == []
    log.note_removed(b"c")
    log.note_cleared()
    log.note_stored(b"d", b"x", [7, 8])
    assert log.take() == [AllBlocksCleared(), BlockStored([b"d"], b"x", [7, 8], 2, None, "CPU")]


def test_the_encoding_is_vllms():
    """Arrays that begin with the event's name."""
    batch = KVEventBatch(
        1.5,
        [BlockStored([b"a"], None, [1], 1, None, "GPU"), BlockRemoved([b"a"]), AllBlocksCleared()],
        3,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["BlockStored", [b"a"], None, [1], 1, None, "GPU"],
            ["BlockRemoved", [b"a"], None],
            ["AllBlocksCleared"],
        ],
        3,
    ]
