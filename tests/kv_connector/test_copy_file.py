import errno
import os

import pytest

from octavo.errors import ConfigError
from octavo.kv_connector.copy_file import CopyFile, read_records
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import make_layout

LAYOUT = make_layout([AttentionCache(2, 4)] * 2)
OTHER = make_layout([AttentionCache(2, 4)] * 2, "float32")
SIZE = LAYOUT.copy_nbytes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "blocks.kv"


def copy(number):
    return memoryview(bytes([number]) * SIZE)


def read(file, slot):
    buffer = bytearray(SIZE)
    file.read(slot, memoryview(buffer))
    return bytes(buffer)


def test_copies_survive(path):
    file = CopyFile(path, LAYOUT, 4)
    file.write(2, copy(7), 1, 0, b"a" * 32)
    file.write(0, copy(8), 2, 0, b"b" * 32)
    file.close()
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    file = CopyFile(path, LAYOUT, 4)
    assert sorted(read_records(path, LAYOUT)) == [(1, 2, 0, b"a" * 32), (2, 0, 0, b"b" * 32)]
    assert read(file, 2) == bytes(copy(7))
    file.write(2, copy(9), 3, 0, b"c" * 32)
    file.remove(0)
    assert list(read_records(path, LAYOUT)) == [(3, 2, 0, b"c" * 32)]
    file.close()


@pytest.mark.parametrize(
    "other",
    [(OTHER, 4), (LAYOUT, 5), (make_layout([AttentionCache(2, 4)] * 2, rank=1, world_size=2), 4)],
)
def test_a_file_of_something_else_is_emptied(path, other):
    file = CopyFile(path, *other)
    file.write(1, memoryview(bytes(other[0].copy_nbytes)), 1, 0, b"a" * 32)
    file.close()
    CopyFile(path, LAYOUT, 4).close()
    assert not list(read_records(path, LAYOUT))


def test_a_file_of_another_division_is_emptied(path):
    """Two ranks have all layers and half of the heads, or half of the layers: as many bytes."""
    heads = make_layout([AttentionCache(2, 4)] * 2, world_size=2)
    layers = make_layout([AttentionCache(4, 4)], world_size=2)
    assert heads.identity == layers.identity
    assert heads.copy_nbytes == layers.copy_nbytes
    file = CopyFile(path, heads, 4)
    file.write(1, memoryview(bytes(heads.copy_nbytes)), 1, 0, b"a" * 32)
    file.close()
    assert len(list(read_records(path, heads))) == 1
    assert not list(read_records(path, layers))
    CopyFile(path, layers, 4).close()
    assert not list(read_records(path, heads))


@pytest.mark.parametrize("at", [0, 39, 40, 47, 48, 55])
def test_a_damaged_header_has_no_records(at, path):
    file = CopyFile(path, LAYOUT, 4)
    file.write(1, copy(1), 1, 0, b"a" * 32)
    file.close()
    data = bytearray(path.read_bytes())
    data[at] ^= 64
    path.write_bytes(data)
    assert not list(read_records(path, LAYOUT))
    CopyFile(path, LAYOUT, 4).close()
    assert not list(read_records(path, LAYOUT))


def test_a_file_that_was_cut_short_is_emptied(path):
    file = CopyFile(path, LAYOUT, 4)
    file.write(1, copy(1), 1, 0, b"a" * 32)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(OSError, match="shorter"):
        read(file, 3)
    file.close()
    CopyFile(path, LAYOUT, 4).close()
    assert not list(read_records(path, LAYOUT))


def test_records_that_were_not_written_whole(path):
    file = CopyFile(path, LAYOUT, 4)
    for slot in range(4):
        file.write(slot, copy(slot), slot + 1, 0, bytes([slot]) * 32)
    file.close()
    data = bytearray(path.read_bytes())
    size = 64
    for at in (0, 10, 47, 60):  # number, group, hash, checksum
        damaged = bytearray(data)
        damaged[4096 + size + at] ^= 1
        path.write_bytes(damaged)
        assert {record[1] for record in read_records(path, LAYOUT)} == {0, 2, 3}
    moved = bytearray(data)
    moved[4096 : 4096 + size] = data[4096 + size : 4096 + 2 * size]
    path.write_bytes(moved)
    assert {record[1] for record in read_records(path, LAYOUT)} == {1, 2, 3}


def test_a_write_that_fails_leaves_the_place_empty(path, monkeypatch):
    file = CopyFile(path, LAYOUT, 4)
    file.write(1, copy(1), 1, 0, b"a" * 32)
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) == SIZE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.write(1, copy(2), 2, 0, b"b" * 32)
    assert not list(read_records(path, LAYOUT))
    file.close()


def test_one_engine_at_a_time(path):
    file = CopyFile(path, LAYOUT, 4)
    with pytest.raises(ConfigError, match="another engine uses it"):
        CopyFile(path, LAYOUT, 4)
    file.close()
    CopyFile(path, LAYOUT, 4).close()


def test_links_and_folders_are_refused(path, tmp_path):
    path.parent.mkdir()
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot be used"):
        CopyFile(path, LAYOUT, 4)
    assert (tmp_path / "target").read_bytes() == b"precious"
    with pytest.raises(ConfigError, match="Change file_path"):
        CopyFile(tmp_path / "target" / "inside", LAYOUT, 4)


def test_no_file_has_no_records(path):
    assert not list(read_records(path, LAYOUT))
    path.parent.mkdir()
    path.write_bytes(b"short")
    assert not list(read_records(path, LAYOUT))
