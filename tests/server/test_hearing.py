"""Tenants take turns at the processes that read sounds."""

import asyncio
from concurrent.futures import Future

import pytest

from octavo.server.hearing import Hearing


class Reader:
    """Reader whose sounds are read when the test says so."""

    def __init__(self):
        self.begun = {}

    def submit(self, data):
        self.begun[data] = future = Future()
        future.set_running_or_notify_cancel()
        return future

    def close(self):
        pass


async def settle():
    for _ in range(8):
        await asyncio.sleep(0)


def with_reads(scenario, names):
    """Run a scenario with tasks that read files, each named by its tenant and a number."""

    async def main():
        hearing = Hearing()
        await hearing.close()
        hearing.reader = reader = Reader()
        tasks = {name: asyncio.create_task(hearing.read(name, name[0])) for name in names}
        await settle()
        await scenario(reader, tasks)
        assert not hearing._reading

    asyncio.run(main())


def test_a_short_clip_passes_a_hundred_long_files():
    long = [f"a{i}" for i in range(100)]

    async def scenario(reader, tasks):
        assert list(reader.begun) == ["a0", "b"]  # while the first long file is being read
        reader.begun["b"].set_result("text")
        assert await tasks["b"] == "text"
        await settle()
        assert list(reader.begun) == ["a0", "b"]  # a place stays free for others
        for name in long:
            reader.begun[name].set_result(name)
            await settle()
        assert [await tasks[name] for name in long] == long

    with_reads(scenario, [*long, "b"])


def test_two_tenants_with_long_files_delay_a_clip_by_one_file():
    async def scenario(reader, tasks):
        assert list(reader.begun) == ["a0", "b0"]
        for name in ("a0", "b0", "c", "b1", "a1", "b2", "a2"):
            reader.begun[name].set_result(name)
            await settle()
        assert list(reader.begun)[:3] == ["a0", "b0", "c"]

    with_reads(scenario, ["a0", "a1", "a2", "b0", "b1", "b2", "c"])


def test_a_client_that_leaves_frees_no_place_that_is_in_use():
    async def scenario(reader, tasks):
        tasks["a0"].cancel()
        tasks["a1"].cancel()
        await settle()
        assert tasks["a0"].cancelled()
        assert tasks["a1"].cancelled()
        assert list(reader.begun) == ["a0"]  # it is still being read
        reader.begun["a0"].set_exception(ValueError("x"))
        await settle()
        assert list(reader.begun) == ["a0", "a2"]
        reader.begun["a2"].set_exception(ValueError("y"))
        with pytest.raises(ValueError, match="y"):
            await tasks["a2"]

    with_reads(scenario, ["a0", "a1", "a2"])
