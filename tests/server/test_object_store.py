"""Store of objects: its limits, its fairness, and its files."""

import asyncio
import logging
import stat
import threading

import pytest

from octavo.frontend.request_memory import RequestMemory
from octavo.server import object_store
from octavo.server.object_store import ObjectStore


def name(number, kind="resp"):
    return f"{kind}_{number:032x}"


def run(scenario, folder=None, memory_bytes=2**20):
    async def use():
        store = ObjectStore(folder, memory_bytes)
        try:
            await scenario(store)
        finally:
            store.close()

    asyncio.run(use())


@pytest.mark.parametrize("on_disk", [False, True])
def test_objects_belong_to_a_key(tmp_path, on_disk):
    async def scenario(store):
        await store.put("a", name(1), b"one")
        await store.put(None, name(1), b"open")
        await store.put("a", name(1), b"two")
        assert await store.get("a", name(1)) == b"two"
        assert await store.get(None, name(1)) == b"open"
        assert await store.get("b", name(1)) is None
        assert not await store.delete("b", name(1))
        assert await store.delete("a", name(1))
        assert not await store.delete("a", name(1))
        assert await store.get("a", name(1)) is None
        assert await store.get(None, name(1)) == b"open"

    run(scenario, tmp_path if on_disk else None)


def test_a_key_with_many_objects_loses_its_own():
    async def scenario(store):
        await store.put("small", name(0), bytes(100))
        for number in range(1, 40):
            await store.put("large", name(number), bytes(6000))
            assert await store.get("large", name(1)) is not None  # it is in use
        assert await store.get("small", name(0)) == bytes(100)
        assert await store.get("large", name(2)) is None
        assert await store.get("large", name(39)) == bytes(6000)
        assert store._in_memory.nbytes <= 2**20 // 8

    run(scenario)


def test_the_number_of_objects_has_a_limit(monkeypatch, tmp_path):
    async def scenario(store):
        await store.put("b", name(0), b"")
        for number in range(1, 9):
            await store.put("a", name(number), b"")
        found = [n for n in range(1, 9) if await store.get("a", name(n)) is not None]
        assert found == [6, 7, 8]
        assert await store.get("b", name(0)) is not None

    monkeypatch.setattr(object_store, "MAX_OBJECTS", 4)
    run(scenario)
    run(scenario, tmp_path)
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 4


def test_memory_is_accounted_for_and_given_to_requests():
    async def scenario(store):
        memory = RequestMemory(2**20)
        first = []
        memory.spare = first.append
        store.use_memory(memory)
        for number in range(10):
            await store.put(None, name(number), bytes(10_000))
        assert memory.used == memory.kept == 10 * (10_000 + 512)
        with memory.reserve(2**20 - 50_000):
            assert first
            assert await store.get(None, name(0)) is None
            assert await store.get(None, name(9)) is not None
        assert memory.used == memory.kept == 4 * (10_000 + 512)
        for number in range(10):
            await store.delete(None, name(number))
        assert memory.used == memory.kept == 0

    run(scenario)


def test_files_survive(tmp_path, caplog):
    async def fill(store):
        for number in range(4):
            await store.put("a", name(number), b"%d" % number)
        await store.put(None, name(0, "conv"), b"open")

    run(fill, tmp_path)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert len(files) == 5
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert not any(file.parent.name == "a" for file in files)
    damaged, short, gone, _ = (file for file in files if file.name.startswith("resp"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    short.write_bytes(b"x")
    (damaged.parent / "x.unfinished").write_bytes(b"x")
    (damaged.parent / "notes.txt").write_bytes(b"x")
    (damaged.parent / name(9)).symlink_to("/etc/hostname")
    (tmp_path / "other").mkdir()

    async def look(store):
        gone.unlink()
        with caplog.at_level(logging.WARNING):
            found = [await store.get("a", name(n)) for n in (0, 1, 2, 3, 9)]
        assert found == [None, None, None, b"3", None]
        assert await store.get(None, name(0, "conv")) == b"open"

    with caplog.at_level(logging.WARNING):
        run(look, tmp_path)
    for word in ("damaged", "notes.txt", "other", "No such file", name(9)):
        assert word in caplog.text
    assert not (damaged.parent / "x.unfinished").exists()
    assert (damaged.parent / "notes.txt").exists()


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(28, "No space left on device")

    async def scenario(store):
        monkeypatch.setattr(object_store, "write_file", fail)
        await store.put(None, name(1), b"x")
        assert await store.get(None, name(1)) == b"x"

    run(scenario, tmp_path)
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("can_remove", [True, False], ids=["full", "read-only"])
def test_an_object_that_cannot_be_written_has_no_earlier_state(tmp_path, monkeypatch, can_remove):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    async def scenario(store):
        await store.put(None, name(1), b"old")
        with monkeypatch.context() as patched:
            patched.setattr(object_store, "write_file", fail)
            if not can_remove:
                patched.setattr(object_store.Path, "unlink", fail)
            await store.put(None, name(1), b"new")
        assert await store.get(None, name(1)) == b"new"
        store._forget("all", name(1))
        assert await store.get(None, name(1)) is None
        await store.put(None, name(1), b"newer")
        store._forget("all", name(1))
        assert await store.get(None, name(1)) == b"newer"

    async def again(store):
        assert await store.get(None, name(1)) == b"newer"
        monkeypatch.setattr(object_store, "write_file", fail)
        await store.put(None, name(1), b"newest")

    async def last(store):
        assert await store.get(None, name(1)) is None

    run(scenario, tmp_path)
    run(again, tmp_path)
    run(last, tmp_path)


def test_a_memory_that_is_too_small_for_an_object(tmp_path):
    async def scenario(store):
        await store.put(None, name(1), bytes(2**20))
        assert store._data == {}
        assert await store.get(None, name(1)) == bytes(2**20)

    run(scenario, tmp_path)


def test_a_slow_read_does_not_bring_back_an_older_object(tmp_path):
    async def fill(store):
        await store.put(None, name(1), b"old")

    async def scenario(store):
        reading = asyncio.create_task(store.get(None, name(1)))
        await asyncio.sleep(0)  # the thread reads the file
        await store.put(None, name(1), bytes(2**20))  # too large for the memory
        assert await reading in (b"old", bytes(2**20))
        assert await store.get(None, name(1)) == bytes(2**20)

    run(fill, tmp_path)
    run(scenario, tmp_path)


def test_a_damaged_file_does_not_hide_a_newer_object(tmp_path):
    async def fill(store):
        await store.put(None, name(1), b"old")

    async def scenario(store):
        (tmp_path / "all" / name(1)).write_bytes(b"x")
        reading = asyncio.create_task(store.get(None, name(1)))
        await asyncio.sleep(0)
        await store.put(None, name(1), bytes(2**20))
        await reading
        assert await store.get(None, name(1)) == bytes(2**20)

    run(fill, tmp_path)
    run(scenario, tmp_path)


def test_a_client_that_leaves_does_not_stop_the_writing(tmp_path):
    async def fill(store):
        go_on = threading.Event()
        store._writer.submit(go_on.wait)
        task = asyncio.create_task(store.put(None, name(1), b"new"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()

    async def look(store):
        assert await store.get(None, name(1)) == b"new"

    run(fill, tmp_path)
    run(look, tmp_path)
