"""Folder that many engines share: whole files or none, of bounded size, of one model only."""

import concurrent.futures
import errno
import os
import time

import pytest

from octavo.errors import ConfigError
from octavo.kv_connector import shared_folder
from octavo.kv_connector.shared_folder import SharedFolder
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import make_layout

CACHES = [AttentionCache(2, 4)] * 2
LAYOUT = make_layout(CACHES)
HASH = bytes(range(32))


def folder(path, layout=LAYOUT, division="1.tp1pp1", max_bytes=10**9):
    return SharedFolder(path / "kv", layout, division, max_bytes)


def copy(number, layout=LAYOUT):
    return memoryview(bytes([number]) * layout.copy_nbytes)


def read(shared, division="1.tp1pp1", rank=0, block_hash=HASH):
    with shared.open(division, rank, 0, block_hash) as file:
        data = bytearray(file.part.copy_nbytes)
        file.read(memoryview(data))
        return bytes(data)


def files(path):
    return [p for p in (path / "kv").rglob("*") if p.is_file()]


def test_what_one_writes_another_finds(tmp_path):
    one, other = folder(tmp_path), folder(tmp_path)
    assert other.find(0, HASH) is None
    one.write(0, HASH, copy(7))
    assert other.find(0, HASH) == "1.tp1pp1"
    assert other.find(1, HASH) is None
    assert read(other) == bytes(copy(7))
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_a_block_is_there_when_all_ranks_have_written_it(tmp_path):
    half = make_layout([AttentionCache(1, 4)] * 2, rank=1, world_size=2)
    ranks = [
        folder(tmp_path, make_layout([AttentionCache(1, 4)] * 2, rank=r, world_size=2), "2.tp2pp1")
        for r in range(2)
    ]
    reader = folder(tmp_path)
    ranks[0].write(0, HASH, copy(1, half))
    assert reader.find(0, HASH) is None
    ranks[1].write(0, HASH, copy(2, half))
    assert reader.find(0, HASH) == "2.tp2pp1"
    assert read(reader, "2.tp2pp1", 1) == bytes(copy(2, half))
    reader.write(0, HASH, copy(3))
    assert reader.find(0, HASH) == "1.tp1pp1", "the own division is found first"


def test_another_model_finds_nothing(tmp_path):
    folder(tmp_path).write(0, HASH, copy(1))
    other = folder(tmp_path, make_layout(CACHES, "float32"))
    assert other.find(0, HASH) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    ],
)
def test_a_damaged_file_cannot_be_opened(tmp_path, damage):
    shared = folder(tmp_path)
    shared.write(0, HASH, copy(1))
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OSError, match=r"does not match its header|no header"):
        read(shared)
    shared.remove("1.tp1pp1", 0, 0, HASH)
    assert shared.find(0, HASH) is None


def test_a_file_under_anothers_name_is_not_taken_for_it(tmp_path):
    shared = folder(tmp_path)
    shared.write(0, HASH, copy(1))
    (file,) = files(tmp_path)
    other = HASH[:1] + bytes(31)
    file.rename(file.with_name(f"0-{other.hex()}.0"))
    with pytest.raises(OSError, match="holds another block"):
        read(shared, block_hash=other)
    file.with_name(f"0-{HASH.hex()}.0").symlink_to(file.with_name(f"0-{other.hex()}.0"))
    with pytest.raises(OSError, match=r"symbolic|links"):
        read(shared)


def test_a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch):
    shared = folder(tmp_path)
    for name in ("write", "fsync"):
        with monkeypatch.context() as patch:

            def fail(*args):
                raise OSError(errno.ENOSPC, "no space")

            patch.setattr(shared_folder.os, name, fail)
            with pytest.raises(OSError, match="no space"):
                shared.write(0, HASH, copy(1))
        assert not files(tmp_path)
    shared.write(0, HASH, copy(1))
    assert len(files(tmp_path)) == 1


def test_the_files_used_least_recently_go_first(tmp_path):
    nbytes = LAYOUT.copy_nbytes + 4096
    shared = folder(tmp_path, max_bytes=10 * nbytes)
    hashes = [bytes([i]) * 32 for i in range(11)]
    for i, block_hash in enumerate(hashes[:10]):
        shared.write(0, block_hash, copy(i))
        shared.write(0, block_hash, copy(i))  # a second write changes nothing
        path = next(p for p in files(tmp_path) if block_hash.hex() in p.name)
        os.utime(path, (0, time.time() - 1000 + i))
    read(shared, block_hash=hashes[0])
    shared._looked = -1e9
    shared.write(0, hashes[10], copy(10))
    left = [i for i, block_hash in enumerate(hashes) if shared.find(0, block_hash)]
    assert left == [0, 3, 4, 5, 6, 7, 8, 9, 10]


def test_what_a_dead_writer_left_is_cleared_away(tmp_path):
    shared = folder(tmp_path)
    shared.write(0, HASH, copy(1))
    (file,) = files(tmp_path)
    for name, age in ((".new-old", 7200), (".new-young", 10)):
        file.with_name(name).write_bytes(b"x")
        os.utime(file.with_name(name), (0, time.time() - age))
    shared._looked = -1e9
    shared.write(0, HASH, copy(1))
    assert sorted(p.name for p in files(tmp_path)) == [".new-young", file.name]


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    shared = folder(tmp_path)
    shared.write(0, HASH, copy(1))
    os.rename(tmp_path / "kv", tmp_path / "other")
    assert shared.find(0, HASH) is None
    shared.write(0, HASH, copy(2))
    assert read(shared) == bytes(copy(2))


def test_many_write_and_read_the_same(tmp_path):
    shared = [folder(tmp_path) for _ in range(4)]

    def work(which):
        for _ in range(40):
            shared[which].write(0, HASH, copy(1))
            assert read(shared[which]) == bytes(copy(1))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, i) for i in range(4)]:
            done.result()
    assert len(files(tmp_path)) == 1


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        folder(tmp_path)
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        folder(tmp_path)
