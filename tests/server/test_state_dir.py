"""Folder of --state-dir."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server import state_dir
from octavo.server.batch_journal import Journal
from octavo.server.object_store import ObjectStore
from octavo.server.state_dir import StateDir, write_file
from tests.server.fake_engine import with_server


def test_one_server_at_a_time(tmp_path):
    path = tmp_path / "a" / "state"
    state = StateDir(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match=r"^state_dir='.*state' is in use by another server"):
        StateDir(str(path))
    state.close()
    StateDir(str(path)).close()


def test_a_folder_that_cannot_be_locked_is_not_in_use(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(state_dir.fcntl, "flock", fail)
    with pytest.raises(ConfigError, match=r"cannot be used: No locks available; name another"):
        StateDir(str(tmp_path))


def test_a_server_holds_its_folder_until_it_ends(tmp_path):
    async def scenario(served):
        with pytest.raises(ConfigError, match="in use"):
            StateDir(str(tmp_path))

    with_server(scenario, state_dir=str(tmp_path))
    StateDir(str(tmp_path)).close()


def test_subfolders_are_private(tmp_path):
    state = StateDir(str(tmp_path))
    folder = state.subfolder("things")
    assert folder == tmp_path / "things"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert state.subfolder("things") == folder
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"things cannot be used: .*without write permission"):
        state.subfolder("things")
    state.close()


def test_wrong_folders(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match=r"^state_dir='.*file' cannot be used: File exists"):
        StateDir(str(file))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="without write permission for others"):
        StateDir(str(shared))


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_file(file, b"old")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            write_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    write_file(file, b"new")
    assert file.read_bytes() == b"new"


@pytest.fixture
def steps(monkeypatch):
    """Record which names the disk gets, and when it must keep those of a folder."""
    found, sync, replace, mkdir = [], os.fsync, os.replace, Path.mkdir

    def noted_sync(descriptor):
        sync(descriptor)
        found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted_replace(old, new):
        found.append(("name", str(new)))
        replace(old, new)

    def noted_mkdir(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        found.append(("name", str(path)))

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(Path, "mkdir", noted_mkdir)
    return found


def test_the_name_of_a_file_survives_a_crash(tmp_path, steps):
    write_file(tmp_path / "file", b"new")
    assert steps[1:] == [("name", str(tmp_path / "file")), ("sync", str(tmp_path))]


def test_the_folder_of_an_owner_survives_a_crash(tmp_path, steps):
    async def put():
        store = ObjectStore(tmp_path, 2**20)
        await store.put(None, f"resp_{0:032x}", b"x")
        store.close()

    asyncio.run(put())
    owner = str(tmp_path / "all")
    assert steps[:2] == [("name", owner), ("sync", str(tmp_path))]
    assert steps[-1] == ("sync", owner)


def test_the_name_of_a_journal_survives_a_crash(tmp_path, steps):
    journal = Journal(tmp_path / "x.journal")
    journal.close()
    assert ("sync", str(tmp_path)) in steps


def test_the_names_of_subfolders_survive_a_crash(tmp_path, steps):
    state = StateDir(str(tmp_path / "s"))
    folder = state.subfolder("things")
    state.close()
    assert steps[-2:] == [("name", str(folder)), ("sync", str(tmp_path / "s"))]
