"""Copies of blocks with items whose encoder failed: in memory, in a file, and in a folder."""

import queue
import threading

import msgspec
import pytest

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig
from octavo.kv_connector.copy_file import read_records
from octavo.kv_connector.offload import OffloadingMetadata
from octavo.kv_connector.shared_storage import Block, SharedStorageMetadata, SharedStorageWorker
from tests.fakes import FakeEngine, picture
from tests.kv_connector.test_offload import LAYOUT, Rank, digest
from tests.kv_connector.test_pages import make_cache
from tests.transfers import make_connector


def test_blocks_before_the_item_stay():
    engine = FakeEngine(
        make_connector=lambda kv: make_connector(kv, 20, 20),
        encoder_cache_size=64,
        max_num_batched_tokens=32,
        block_size=8,
    )
    connector = engine.scheduler._connector
    engine.add("1", range(60), features=[picture("a", 10, 10)])
    request = engine.scheduler.requests["1"]
    engine.schedule()
    engine.schedule()  # its blocks are being saved when the failure is known
    read = (0, request.block_hashes[2])
    connector._memory.pin(read)
    engine.in_flight[0][1].errors["1"] = "its encoder failed"
    engine.update()
    engine.update()
    first = (0, request.block_hashes[0])
    assert {*connector._memory} == {first, read}
    assert connector._has(first)
    assert not connector._has(read)
    connector._unpin(read)
    assert [*connector._memory] == [*connector._file] == [first]
    engine.add("2", range(3))
    metadata = msgspec.msgpack.decode(
        engine.schedule().kv_connector_metadata, type=OffloadingMetadata
    )
    assert len(metadata.emptied) == len({*metadata.emptied}) == 6
    assert connector._file.slot(first) not in metadata.emptied
    assert not connector._dropped


def test_an_engine_that_follows_does_not_find_emptied_slots(tmp_path):
    rank = Rank(tmp_path / "kv")
    rank.save((1, 0, 0), (2, 1, 1))
    rank.worker.start_load_kv(OffloadingMetadata(emptied=[1]))
    rank.worker.shutdown()
    assert [slot for _, slot, *_ in read_records(rank.path, LAYOUT)] == [0]


@pytest.fixture
def worker(tmp_path):
    extra = {"shared_storage_path": str(tmp_path / "kv"), "write_buffer_bytes": 2**20}
    config = KVTransferConfig(
        kv_connector="SharedStorageConnector", engine_id="0", kv_connector_extra_config=extra
    )
    config = EngineConfig(cache=CacheConfig(kv_transfer_config=config))
    made = SharedStorageWorker(config, LAYOUT, lambda: None)
    _, made.kv_caches = make_cache(LAYOUT)
    return made


def test_a_file_that_is_being_written_is_removed(worker, monkeypatch):
    told, folder = threading.Event(), worker._folder
    write = folder.write

    def write_late(*args):
        assert told.wait(60)
        write(*args)

    monkeypatch.setattr(folder, "write", write_late)
    worker.start_load_kv(SharedStorageMetadata(saves=[Block(0, i, digest(i)) for i in (1, 2)]))
    for layer in range(2):
        worker.save_kv_layer(layer)
    worker.wait_for_save()
    worker.start_load_kv(SharedStorageMetadata(forgotten=[(0, digest(1))]))
    told.set()
    worker.shutdown()
    assert [folder.find(0, digest(i)) for i in (1, 2)] == [None, folder.division]


def test_a_file_whose_place_in_memory_has_another_block_is_removed(worker):
    """Its write ended after the scheduler had removed the files."""
    worker._free = queue.SimpleQueue()
    worker._free.put(0)
    for i in (1, 2):
        worker.start_load_kv(SharedStorageMetadata(saves=[Block(0, i, digest(i))]))
        for layer in range(2):
            worker.save_kv_layer(layer)
        worker.wait_for_save()
    worker.start_load_kv(SharedStorageMetadata(forgotten=[(0, digest(1))]))
    worker.shutdown()
    assert [worker._folder.find(0, digest(i)) for i in (1, 2)] == [None, worker._folder.division]
