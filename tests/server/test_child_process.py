"""Child processes of a few lines, watched by the first one."""

import asyncio
import os
import signal
import textwrap

import pytest

from octavo.errors import EngineDeadError
from octavo.server import child_process
from octavo.server.child_process import Child

BEGIN = """
import asyncio
from typing import Any

from octavo.errors import EngineDeadError
from octavo.server.child_process import Parent, read_message
setup = read_message(dict[str, Any])
parent = Parent(setup["pulse"])
"""
BEAT = "asyncio.run(parent.beat())"


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children = []

    def start(code):
        (tmp_path / "acting.py").write_text(BEGIN + textwrap.dedent(code))
        child = Child("acting")
        child.tell_message({"pulse": child.pulse})
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.close()


async def until_begun(child):
    async with asyncio.timeout(60):
        while not child.has_begun:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_and_a_stop_are_found(start, number):
    async def test():
        child = start(BEAT)
        watching = asyncio.create_task(child.watch(60.0))
        await until_begun(child)
        os.kill(child.pid, number)
        async with asyncio.timeout(60):
            return await watching

    stopped = "was stopped by a signal such as SIGSTOP, and killed"
    found = asyncio.run(test())
    assert found == ("was killed by SIGKILL" if number == signal.SIGKILL else stopped)


def test_silence_is_found(start):
    async def test():
        child = start("""
            import os, time
            os.write(setup["pulse"], b"\\0")
            time.sleep(60)
        """)
        return await child.watch(0.3)

    # A shorter silence is chance.
    assert asyncio.run(test()).startswith("has sent no heartbeat for 2.")


def test_one_that_never_says_a_word(start, monkeypatch):
    monkeypatch.setattr(child_process, "_START_SECONDS", 0.1)
    monkeypatch.setattr(child_process, "_LEAST_SILENCE", 0.0)
    child = start("import time; time.sleep(60)")
    assert asyncio.run(child.watch(0.2)).startswith("has sent no heartbeat for 0.")
    assert not child.has_begun


def test_its_last_words_are_raised_while_it_lives(start):
    child = start("""
        parent.tell_failure(EngineDeadError("no memory " * 20_000))
        read_message(str)
    """)
    with pytest.raises(EngineDeadError, match=r"^no memory no memory"):
        asyncio.run(child.watch(60.0))
    assert asyncio.run(child.end(10.0)) == 0


@pytest.mark.parametrize("status", [0, 3])
def test_messages_come_one_by_one_and_an_end(start, status):
    child = start(f"""
        import sys
        assert read_message(list[int]) == [1, 2]
        assert read_message(str) == "x"
        assert read_message(str) is None
        sys.exit({status})
    """)
    child.tell_message([1, 2])
    child.tell_message("x")
    assert asyncio.run(child.end(10.0)) == status
    assert asyncio.run(child.watch(60.0)) == f"ended with status {status}"
    child.tell(b"nobody is there")
