"""Both halves of an `OffloadingConnector`, on arrays and real files."""

import ctypes
import gc
import mmap
import os
import sys
import threading

import numpy as np
import pytest

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.offload import (
    Load,
    OffloadingMetadata,
    OffloadingSettings,
    OffloadingWorker,
    Save,
    file_of,
)
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import make_cache, make_layout

LAYOUT = make_layout([AttentionCache(2, 4)] * 2)
NONE = -1


class Rank:
    """Worker's half with `slots` places in memory, and the cache that it copies from and to."""

    def __init__(self, folder, slots=3, file_slots=5):
        extra = {
            "cpu_bytes_to_use": slots * LAYOUT.copy_nbytes,
            "file_path": str(folder),
            "file_bytes_to_use": file_slots * LAYOUT.copy_nbytes,
        }
        config = KVTransferConfig(
            kv_connector="OffloadingConnector", engine_id="0", kv_connector_extra_config=extra
        )
        engine_config = EngineConfig(cache=CacheConfig(kv_transfer_config=config))
        self.told = threading.Event()
        self.worker = OffloadingWorker(engine_config, LAYOUT, self.told.set)
        self.tensors, self.worker.kv_caches = make_cache(LAYOUT)
        self.path = file_of(config, OffloadingSettings.of(config), LAYOUT)

    def save(self, *blocks, epoch=0):
        """Save blocks, each (block, slot, place in the file)."""
        saves = [Save(0, b, slot, digest(b), at, 1 + b) for b, slot, at in blocks]
        self.worker.start_load_kv(OffloadingMetadata(epoch, saves))
        self.end_step()
        for spill in list(self.worker._file_spills.values()):
            spill.result()

    def end_step(self):
        for layer in range(len(self.tensors)):
            self.worker.save_kv_layer(layer)
        self.worker.wait_for_save()

    def load(self, *blocks):
        """Load blocks, each (block, slot, place in the file, source); return the damaged ones."""
        loads = [Load(0, b, slot, digest(of), at) for b, slot, at, of in blocks]
        self.told.clear()
        self.worker.start_load_kv(OffloadingMetadata(0, [], {"r": loads}))
        assert self.told.wait(60)
        assert self.worker.get_finished() == (set(), {"r"})
        return self.worker.get_block_ids_with_load_errors()

    def same(self, first, second):
        return all((tensor[first] == tensor[second]).all() for tensor in self.tensors)


def digest(block):
    return bytes([block + 1]) * 32


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path / "kv")
    yield made
    made.worker.shutdown()


def test_from_memory_and_from_the_file(rank):
    rank.save((1, 0, 0), (2, 1, 1))
    assert rank.load((4, 0, NONE, 1)) == set()
    assert rank.load((5, 2, 1, 2)) == set()
    assert rank.load((6, NONE, 0, 1)) == set()  # without a place in memory
    assert rank.same(4, 1)
    assert rank.same(5, 2)
    assert rank.same(6, 1)


def test_a_place_is_written_again_only_when_the_file_has_it(rank):
    for block in range(5):
        rank.save((block, 0, block))
    for block in range(5):
        assert rank.load((6, 1, block, block)) == set()
        assert rank.same(6, block)


def test_bits_that_change_in_memory(rank):
    rank.save((1, 0, 0))
    rank.worker._memory[7] ^= 4
    assert rank.load((4, 0, NONE, 1)) == {4}
    assert rank.load((4, 0, 0, 1)) == set()  # the file's content is right
    assert rank.same(4, 1)


@pytest.mark.parametrize("fault", ["cut", "bits", "zeros"])
def test_a_file_that_is_damaged_while_it_is_used(rank, fault):
    rank.save((1, 0, 0), (2, 1, 1))
    if fault == "cut":
        os.truncate(rank.path, 5000)
    else:
        data = bytearray(rank.path.read_bytes())
        for at in range(4096 * 2, len(data), 50):
            data[at] = 0 if fault == "zeros" else data[at] ^ 1
        with rank.path.open("r+b") as file:
            file.write(data)
    assert rank.load((4, 2, 0, 1), (5, NONE, 1, 2)) == {4, 5}
    rank.save((3, 2, 2))  # it continues
    assert rank.load((6, 0, 2, 3)) == set()


def test_a_file_that_was_deleted_goes_on_until_the_end(rank, tmp_path):
    rank.save((1, 0, 0))
    rank.path.unlink()
    assert rank.load((4, 1, 0, 1)) == set()
    rank.worker.shutdown()
    again = Rank(tmp_path / "kv")
    assert again.load((4, 1, 0, 1)) == {4}  # a new one
    again.worker.shutdown()


def resident(array):
    """Return the bytes of an array's pages that the system has allocated."""
    nbytes = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_void_p(array.ctypes.data)
    assert libc.mincore(start, ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="memory is taken early on Linux only")
def test_memory_for_what_an_earlier_run_left_is_taken_early(tmp_path):
    slots = 200
    first = Rank(tmp_path / "kv", slots, slots)
    assert resident(first.worker._memory) == 0
    first.save(*((1, slot, slot) for slot in range(100)))
    first.worker.shutdown()
    again = Rank(tmp_path / "kv", slots, slots)
    before = [tensor.copy() for tensor in again.tensors]
    again.worker.register_kv_caches(again.worker.kv_caches)
    again.worker._touching.shutdown()
    size = LAYOUT.copy_nbytes
    assert 100 * size <= resident(again.worker._memory) < 100 * size + mmap.PAGESIZE
    assert all((now == old).all() for now, old in zip(again.tensors, before, strict=True))
    again.worker.shutdown()


def test_steps_that_failed_save_nothing(rank):
    rank.worker.start_load_kv(OffloadingMetadata(0, [Save(0, 1, 0, digest(1), NONE, 0)]))
    rank.worker.step_failed()
    rank.worker.start_load_kv(OffloadingMetadata(0, [Save(0, 2, 1, digest(2), NONE, 0)]))
    rank.end_step()
    assert not np.any(rank.worker._memory)
    rank.save((3, 2, NONE), epoch=1)
    assert np.any(rank.worker._memory)


def test_a_broken_load_is_a_damaged_one(rank, monkeypatch):
    rank.save((1, 0, 0))

    def broken(copies):
        raise MemoryError

    monkeypatch.setattr(rank.worker.kv_caches, "load", broken)
    assert rank.load((4, 0, NONE, 1)) == {4}


def test_nothing_stays_open(tmp_path):
    gc.collect()  # what other tests have left
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(3):
        rank = Rank(tmp_path / "kv")
        rank.save((1, 0, 0))
        rank.load((4, 0, 0, 1))
        rank.worker.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "cpu_bytes_to_use=0 has no room"),
        ({"cpu_bytes_to_use": "much"}, "Expected `int`"),
        ({"cpu_bytes_to_use": 1, "file_path": "/x"}, "go together"),
        ({"cpu_bytes_to_use": 1, "file_bytes_to_use": 9}, "go together"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "mru"}, "is not one of lru, arc"),
        ({"cpu_bytes_to_use": 1, "port": 3}, "unknown field `port`"),
    ],
    ids=str,
)
def test_settings_that_are_wrong(extra, says):
    config = KVTransferConfig(kv_connector="OffloadingConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=says):
        OffloadingSettings.of(config)


def test_places_are_shared_by_ranks():
    layout = make_layout([AttentionCache(2, 4)], world_size=2)
    settings = OffloadingSettings(cpu_bytes_to_use=9 * layout.copy_nbytes)
    assert settings.num_slots(layout) == (4, 0)
    with pytest.raises(ConfigError, match="raise it"):
        OffloadingSettings(cpu_bytes_to_use=layout.copy_nbytes).num_slots(layout)
