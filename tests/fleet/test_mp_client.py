"""Messages of a process, and the time at which the client processes them."""

import asyncio
from collections import deque

import msgspec
import pytest

from octavo.engine import core_messages
from octavo.engine.kept_items import KeptItems, RequestWithItems
from octavo.errors import EngineDeadError, EngineStoppedError
from octavo.fleet.mp_client import AsyncMPClient
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from tests.engine.test_kept_items import request_of
from tests.plan.plans import make_plan


class Process:
    """Engine process that has sent some messages, and its channel."""

    def __init__(self, *messages):
        self.messages = deque(messages)
        self.sent = []
        self.closed, self.killed, self.was_stopped = False, None, False

    def open_channel(self):
        return self

    async def send(self, kind, payload):
        self.sent.append((kind, payload))

    async def receive(self, seconds):
        return self.receive_nowait()

    def receive_nowait(self):
        return self.messages.popleft() if self.messages else None

    def describe_exit(self):
        return "it ended"

    def kill(self, reason):
        self.killed = reason

    def close(self):
        self.closed = True


def outputs(token):
    made = EngineCoreOutputs([EngineCoreOutput("r", [token])])
    return core_messages.OUTPUTS, msgspec.msgpack.encode(made)


def tokens(taken):
    return [output.new_token_ids for output in taken.outputs]


def test_what_is_there_can_be_had_at_once():
    async def main():
        client = AsyncMPClient(Process(outputs(1), outputs(2), outputs(3)))
        assert tokens(await client.get_output()) == [[1]]
        assert tokens(client.get_output_nowait()) == [[2]]
        assert tokens(await client.get_output()) == [[3]]
        assert client.get_output_nowait() is None
        with pytest.raises(EngineDeadError, match="it ended"):
            await client.get_output()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            (core_messages.DEAD, msgspec.msgpack.encode(core_messages.CoreDead("no memory"))),
            "no memory",
        ),
        ((core_messages.OUTPUTS, b"\xc1"), "invalid message"),
    ],
)
def test_the_rest_is_left_to_who_waits(message, error):
    async def main():
        process = Process(outputs(1), message, outputs(2))
        client = AsyncMPClient(process)
        await client.get_output()
        for _ in range(2):
            assert client.get_output_nowait() is None
        with pytest.raises(EngineDeadError, match=error):
            await client.get_output()
        assert (process.killed is not None) == (message[0] == core_messages.OUTPUTS)

    asyncio.run(main())


def test_items_are_sent_once_to_an_engine_that_keeps_them():
    """Engines keep nothing before they have said so, and nothing that could not be encoded."""

    async def main():
        ready = core_messages.CoreReady(make_plan(64, 8), kept_items_nbytes=10_000)
        process = Process((core_messages.READY, msgspec.msgpack.encode(ready)), outputs(1))
        client, kept = AsyncMPClient(process), KeptItems()
        await client.add_request(request_of("a"))
        kind, payload = process.sent.pop()
        assert kind == core_messages.ADD
        assert msgspec.msgpack.decode(payload, type=EngineCoreRequest) == request_of("a")
        await client.get_output()
        bad = request_of("a")
        bad.request_id = object()
        with pytest.raises(TypeError):
            await client.add_request(bad)
        assert not process.sent
        sizes = []
        for name in ("a", "a", "b"):
            await client.add_request(request_of(name))
            kind, payload = process.sent.pop()
            assert kind == core_messages.ITEMS
            sizes.append(len(payload))
            message = msgspec.msgpack.decode(payload, type=RequestWithItems)
            assert kept.complete(message) == request_of(name)
        assert sizes[0] == sizes[2] > sizes[1] + 100
        await client.add_request(request_of())
        assert process.sent.pop()[0] == core_messages.ADD

    asyncio.run(main())


@pytest.mark.parametrize("said", [True, False])
def test_that_a_signal_held_the_engine_is_known(said):
    async def main():
        dead = core_messages.CoreDead("a worker is stopped", stopped=True)
        process = Process(*([(core_messages.DEAD, msgspec.msgpack.encode(dead))] if said else []))
        process.was_stopped = not said
        with pytest.raises(EngineStoppedError):
            await AsyncMPClient(process).get_output()

    asyncio.run(main())


def test_a_closed_one_has_nothing():
    client = AsyncMPClient(process := Process(outputs(1)))
    process.close()
    assert client.get_output_nowait() is None
