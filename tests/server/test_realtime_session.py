"""A session of /v1/realtime without a network: its idle time and its memory."""

import asyncio
import base64
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.frontend.request_memory import RequestMemory
from octavo.server import realtime
from octavo.server.hearing import Hearing
from octavo.server.middleware import RequestContext


class Socket:
    """Connection of a client, whose messages are in a queue."""

    def __init__(self):
        self.scope = {"octavo": RequestContext("id", time.monotonic())}
        self.queue, self.sent, self.code = asyncio.Queue(), [], None
        self.waiting = False

    async def receive(self):
        self.waiting = self.queue.empty()
        message = await self.queue.get()
        self.waiting = False
        return message

    async def send_text(self, text):
        self.sent.append(json.loads(text))

    async def close(self, code):
        self.code = code

    def say(self, event):
        self.queue.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def append(self, samples):
        audio = base64.b64encode(np.asarray(samples, "<i2").tobytes()).decode()
        self.say({"type": "input_audio_buffer.append", "audio": audio})

    def hang_up(self):
        self.queue.put_nowait({"type": "websocket.disconnect"})


@pytest.fixture
def hearing():
    made = Hearing()
    yield made
    made.reader.close()


def session_of(socket, hearing, memory):
    state = SimpleNamespace(hearing=hearing, drain_began=asyncio.Event(), model_names=["m"])
    engine = SimpleNamespace(request_memory=memory)
    return realtime._Session(socket, state, engine, None, "me")


class Clock:
    """Clock of sessions, which stands still between the messages of a client."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(realtime, "time", made)
    return made


async def pass_seconds(clock, socket, seconds):
    """Wait until the client's messages have been read; then pass some seconds."""
    while not socket.queue.empty() or not socket.waiting:
        await asyncio.sleep(0)
    clock.now += seconds


@pytest.mark.parametrize("event", [{"type": "?"}, None], ids=["events", "single samples"])
def test_a_session_without_new_sound_is_idle(hearing, clock, event):
    """Events without sound, and single samples, do not keep it."""

    async def main():
        socket, memory = Socket(), RequestMemory(2**20)
        running = asyncio.create_task(session_of(socket, hearing, memory).run())
        for _ in range(4):
            await pass_seconds(clock, socket, 99)
            assert not running.done()
            if event is None:
                socket.append([0])
            else:
                socket.say(event)
        async with asyncio.timeout(60):
            await running
        assert socket.code == 1001
        assert socket.sent[-1]["error"]["code"] == "session_idle"
        assert memory.used == 0

    asyncio.run(main())


def test_silence_is_sound(hearing, clock):
    async def main():
        socket, memory = Socket(), RequestMemory(2**20)
        running = asyncio.create_task(session_of(socket, hearing, memory).run())
        for _ in range(5):
            socket.append([0] * 2400)
            await pass_seconds(clock, socket, 299)
        socket.hang_up()
        await running
        assert socket.code is None
        assert [event["type"] for event in socket.sent] == ["session.created"]
        assert memory.used == 0

    asyncio.run(main())


def test_the_memory_of_sound(hearing):
    """A session refuses messages beyond its limits, goes on, and gives back all at its end."""
    turns = {"audio": {"input": {"turn_detection": None}}}

    async def main():
        socket, memory = Socket(), RequestMemory(4 * 2**16)
        session = session_of(socket, hearing, memory)
        session._settings = session._settings.updated(turns)
        session._detector = None
        for _ in range(40):
            socket.append([1] * 1000)
        socket.hang_up()
        await session.run()
        errors = [event for event in socket.sent if event["type"] == "error"]
        kept = 40 - len(errors)
        assert 0 < kept < 33
        assert {event["error"]["code"] for event in errors} == {"sound_memory_full"}
        assert len(session._buffer) == kept * 2000
        assert memory.used == 0

    asyncio.run(main())
