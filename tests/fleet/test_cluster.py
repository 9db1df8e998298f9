"""Port of the head node: which nodes may join, and the engines of nodes that leave."""

import asyncio
import contextlib
import logging
import socket
from typing import ClassVar

import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo import __version__
from octavo.config import EngineConfig
from octavo.engine import core_messages, head
from octavo.engine.core_messages import CoreProcessSetup, ReachedBy
from octavo.errors import ConfigError, EngineDeadError, NodeMissingError
from octavo.fleet import cluster
from octavo.fleet.cluster import ClusterKey, Exited, Hub, Join, Launch, RemoteProcess
from octavo.fleet.mp_client import AsyncMPClient
from tests.e2e.harness import free_port
from tests.plan.plans import make_plan

JOIN = Join(__version__, "m", 4, 2, 2, "a node")
SETUP = CoreProcessSetup(EngineConfig(), "", 0, None, None, "info", "text")


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("k" * 40)
    path.chmod(0o600)
    return path


@pytest.fixture
def key(key_file):
    return ClusterKey.from_file(str(key_file))


def test_a_key_is_made_from_a_file(key_file, key, tmp_path):
    assert ClusterKey.from_file(str(key_file)) == key
    key_file.write_text("k" * 40 + "\n")
    assert ClusterKey.from_file(str(key_file)) == key
    key_file.write_text("j" * 40)
    assert ClusterKey.from_file(str(key_file)) != key
    key_file.write_text("short")
    with pytest.raises(ConfigError, match=r"5 characters.*at least 32.*openssl"):
        ClusterKey.from_file(str(key_file))
    key_file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"read by others.*chmod 600"):
        ClusterKey.from_file(str(key_file))
    with pytest.raises(ConfigError, match=r"cannot be read.*No such file"):
        ClusterKey.from_file(str(tmp_path / "none"))


class Peer:
    """Socket of a node or of one of its engines."""

    made: ClassVar[list["Peer"]] = []

    def __init__(self, hub, key, name):
        self.made.append(self)  # its end must not precede that of its context
        reached = ReachedBy(hub.address, key.public, key.secret, b"")
        self.socket = head.connect(zmq.asyncio.Context.instance(), reached, name)

    async def send(self, kind, message=None, number=None):
        numbers = [] if number is None else [number.to_bytes(8, "little")]
        await self.socket.send_multipart([kind, *numbers, msgspec.msgpack.encode(message)])

    async def receive(self, seconds=60.0):
        async with asyncio.timeout(seconds):
            kind, *_, payload = await self.socket.recv_multipart()
        return kind, payload


def run(test, key, port=0):
    async def main():
        joined = []
        hub = Hub("127.0.0.1", port, key, model="m", size=4, local=2, on_join=joined.append)
        hub.attach()
        try:
            async with asyncio.timeout(120):
                await test(hub, joined)
        finally:
            await hub.shutdown()
            zmq.asyncio.Context.instance().destroy(linger=0)
            Peer.made.clear()

    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def make_engine(hub, key):
    """Return a node that has joined, and an engine process that it had to start."""
    node = Peer(hub, key, b"N1")
    await node.send(cluster.JOIN, JOIN)
    assert (await node.receive())[0] == cluster.WELCOME
    process = hub.launch(3, SETUP)
    while (said := await node.receive())[0] == cluster.ALIVE:
        pass
    kind, payload = said
    assert kind == cluster.LAUNCH
    launch = msgspec.msgpack.decode(payload, type=Launch)
    return node, process, launch.launch_id


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": "0.0.1"}, "it runs Octavo 0.0.1"),
        ({"model": "another"}, "its model has other files"),
        ({"data_parallel_size": 8}, "data_parallel_size=8, the head node 4"),
        ({"start_rank": 1}, "its engines are 1 to 2, and those of nodes are 2 to 3"),
        ({"num_engines": 3}, "its engines are 2 to 4"),
        ({"num_engines": 0}, "its engines are"),
        ({"num_engines": -(2**62)}, "its engines are"),
    ],
)
def test_who_does_not_fit_is_refused(key, caplog, fields, why):
    async def test(hub, joined):
        node = Peer(hub, key, b"N1")
        await node.send(cluster.JOIN, msgspec.structs.replace(JOIN, **fields))
        kind, payload = await node.receive()
        assert kind == cluster.REFUSED
        assert why in msgspec.msgpack.decode(payload)
        assert joined == []
        assert not hub.has(2)

    run(test, key)
    assert "rejected the node a node" in caplog.text


def test_an_engine_is_one_nodes_only(key):
    async def test(hub, joined):
        first, second = Peer(hub, key, b"N1"), Peer(hub, key, b"N2")
        await first.send(cluster.JOIN, msgspec.structs.replace(JOIN, num_engines=1))
        assert (await first.receive())[0] == cluster.WELCOME
        await first.send(cluster.JOIN, msgspec.structs.replace(JOIN, num_engines=1))
        assert (await first.receive())[0] == cluster.WELCOME  # the node had not received it
        await second.send(cluster.JOIN, JOIN)
        with pytest.raises(TimeoutError):  # the first one may be dead
            await second.receive(0.1)
        kind = None
        while kind is None:  # until the hub has heard the first one
            await first.send(cluster.ALIVE)
            await second.send(cluster.JOIN, JOIN)
            with contextlib.suppress(TimeoutError):
                kind, payload = await second.receive(0.05)
        assert kind == cluster.REFUSED
        assert "engine 2 is another node's" in msgspec.msgpack.decode(payload)
        assert joined == [range(2, 3)]
        assert (hub.has(1), hub.has(2), hub.has(3)) == (False, True, False)
        with pytest.raises(NodeMissingError, match="no node has joined for engine 3"):
            hub.launch(3, SETUP)

    run(test, key)


def test_a_node_takes_the_place_of_one_that_has_died(key):
    async def test(hub, joined):
        first, second = Peer(hub, key, b"N1"), Peer(hub, key, b"N2")
        await first.send(cluster.JOIN, JOIN)
        assert (await first.receive())[0] == cluster.WELCOME
        first.socket.close(linger=0)
        kind = None
        while kind is None:
            await second.send(cluster.JOIN, JOIN)
            with contextlib.suppress(TimeoutError):
                kind, _ = await second.receive(0.05)
        assert kind == cluster.WELCOME
        assert joined == [range(2, 4)] * 2

    run(test, key)


def test_nobody_gets_in_without_the_key(key, key_file, caplog):
    key_file.write_text("j" * 40)
    other = ClusterKey.from_file(str(key_file))

    async def test(hub, joined):
        stranger = Peer(hub, other, b"N1")
        plain = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        plain.connect(hub.address)
        await stranger.send(cluster.JOIN, JOIN)
        await plain.send_multipart([cluster.JOIN, msgspec.msgpack.encode(JOIN)])
        await until(lambda: "without the cluster's key" in caplog.text)
        with pytest.raises(TimeoutError):
            await stranger.receive(0.3)
        plain.close(linger=0)
        assert joined == []
        await make_engine(hub, key)  # no other node is kept out

    run(test, key)


def test_what_is_no_message_harms_nobody(key, caplog):
    async def test(hub, joined):
        node = Peer(hub, key, b"N1")
        for frames in ([b""], [b"j"], [b"j", b"\xff"], [b"e", b"\xc0"], [b"j", b"1", b"2", b"3"]):
            await node.socket.send_multipart(frames)
        engine = Peer(hub, key, b"I" + b"?" * 16)
        await engine.socket.send_multipart([b"", b""])
        _, process, launch_id = await make_engine(hub, key)
        engine = Peer(hub, key, b"O" + launch_id)
        await engine.socket.send_multipart([b"only one"])
        await engine.send(core_messages.OUTPUTS, "said", 1)
        assert await process.receive(60) == (core_messages.OUTPUTS, msgspec.msgpack.encode("said"))

    run(test, key)
    assert "an invalid message" in caplog.text


def test_an_engine_is_talked_to_in_order(key):
    async def test(hub, joined):
        _, process, launch_id = await make_engine(hub, key)
        channel = process.open_channel()
        await channel.send(core_messages.ADD, b"first")  # it has not joined yet
        inputs, outputs = (Peer(hub, key, kind + launch_id) for kind in (b"I", b"O"))
        await inputs.socket.send(head.HELLO)
        assert await inputs.receive() == (core_messages.ADD, b"first")
        await channel.send(core_messages.ABORT, b"second")
        assert await inputs.receive() == (core_messages.ABORT, b"second")
        for number in (1, 2):
            await outputs.send(core_messages.OUTPUTS, number, number)
        for number in (1, 2):
            assert await channel.receive(60) == (core_messages.OUTPUTS, bytes([number]))
        assert await channel.receive(0.01) is None
        assert process.describe_exit() is None

    run(test, key)


def test_an_engine_of_which_messages_were_lost_is_ended(key):
    async def test(hub, joined):
        node, process, launch_id = await make_engine(hub, key)
        outputs = Peer(hub, key, b"O" + launch_id)
        await outputs.send(core_messages.OUTPUTS, None, 1)
        await outputs.send(core_messages.OUTPUTS, None, 3)
        await until(process.describe_exit)
        assert "messages of the engine were lost" in process.describe_exit()
        while (said := await node.receive())[0] == cluster.ALIVE:
            pass
        assert said[0] == cluster.KILL

    run(test, key)


@pytest.mark.parametrize(
    ("kind", "count"),
    [(core_messages.OUTPUTS, 1), (core_messages.RESULT, 1), (core_messages.READY, 2)],
)
def test_an_engine_that_cannot_be_understood_ends_alone(key, kind, count):
    async def test(hub, joined):
        _, process, launch_id = await make_engine(hub, key)
        client = AsyncMPClient(process)
        outputs = Peer(hub, key, b"O" + launch_id)
        ready = msgspec.msgpack.encode(core_messages.CoreReady(make_plan(2048, 100)))
        for number in range(1, count + 1):
            payload = ready if kind == core_messages.READY else b"\xc1"
            await outputs.socket.send_multipart([kind, number.to_bytes(8, "little"), payload])
        with pytest.raises(EngineDeadError, match="invalid message"):
            await client.get_output()
        assert "an invalid message" in process.describe_exit()

    run(test, key)


def test_how_an_engine_ended_is_told(key):
    async def test(hub, joined):
        node, process, launch_id = await make_engine(hub, key)
        await node.send(cluster.EXITED, Exited(b"another", "?"))
        await node.send(cluster.EXITED, Exited(launch_id, "the engine process was killed", True))
        await until(process.describe_exit)
        assert process.was_stopped
        assert process.describe_exit() == "the engine process was killed (on a node)"

    run(test, key)


@pytest.mark.parametrize("stopped", [True, False])
def test_the_engines_of_a_node_that_goes_have_ended(key, monkeypatch, stopped, caplog):
    async def test(hub, joined):
        node, process, _ = await make_engine(hub, key)
        if stopped:
            await node.send(cluster.LEAVE)
        else:
            monkeypatch.setattr(cluster, "GONE_SECONDS", 0.2)
        await until(process.describe_exit)
        why = "was stopped" if stopped else "has not been heard for"
        assert f"the node a node {why}" in process.describe_exit()
        assert not hub.has(3)
        await node.send(cluster.ALIVE)
        while (said := await node.receive())[0] == cluster.ALIVE:
            pass
        assert said[0] == cluster.FORGOTTEN  # it has returned too late, and must join again

    run(test, key)


def test_a_connection_that_is_closed_is_found_by_the_next_message(key):
    async def test(hub, joined):
        node, process, launch_id = await make_engine(hub, key)
        inputs = Peer(hub, key, b"I" + launch_id)
        await inputs.socket.send(head.HELLO)
        await process.open_channel().send(core_messages.ADD, b"1")
        assert (await inputs.receive())[0] == core_messages.ADD
        inputs.socket.close(linger=0)
        while process.describe_exit() is None:  # the hub may not know yet that it is closed
            await process.send(core_messages.ADD, b"2")
            await asyncio.sleep(0.05)
        assert process.describe_exit() == "the engine has closed the connection (on a node)"
        process = hub.launch(3, SETUP)
        node.socket.close(linger=0)
        await until(process.describe_exit)
        assert process.describe_exit() == "the node a node has closed the connection"

    run(test, key)


def test_a_head_that_ends_tells_its_nodes(key):
    async def test(hub, joined):
        node, *_ = await make_engine(hub, key)
        await hub.shutdown()
        while (said := await node.receive())[0] == cluster.ALIVE:
            pass
        assert said[0] == cluster.LEAVE

    run(test, key)


def test_an_address_that_cannot_be_listened_on_is_refused(key):
    async def test(hub, joined):
        port = int(hub.address.rpartition(":")[2])
        Hub("localhost", 0, key, model="m", size=4, local=2, on_join=joined.append).close()
        with pytest.raises(ConfigError, match=f"data_parallel_rpc_port={port}: cannot listen"):
            Hub("127.0.0.1", port, key, model="m", size=4, local=2, on_join=joined.append)
        with pytest.raises(ConfigError, match=r"data_parallel_address='no\.such\.host\.invalid'"):
            Hub("no.such.host.invalid", 1, key, model="m", size=4, local=2, on_join=joined.append)

    run(test, key)


def test_the_next_port_is_kept_for_processes_of_this_machine(key):
    async def test(hub, joined):
        address = hub.reserve_next_port()
        host, _, port = hub.address.rpartition(":")
        assert address == f"tcp://127.0.0.1:{int(port) + 1}"
        for _ in range(2):  # of one process after the other
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(address)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", int(port) + 1))
        hub.address = f"{host}:{int(port) - 1}"
        with pytest.raises(ConfigError, match=f"need the port after it, too, and {port} cannot"):
            hub.reserve_next_port()
        hub.address = f"{host}:65535"
        with pytest.raises(ConfigError, match="65536 cannot be used"):
            hub.reserve_next_port()

    run(test, key, free_port(2))


def test_killed_and_closed(key):
    async def test(hub, joined):
        node, process, _ = await make_engine(hub, key)
        assert isinstance(process, RemoteProcess)
        process.kill("it did not answer")
        process.kill("twice")
        assert process.describe_exit() == "it did not answer and was killed (on a node)"
        kinds = []
        while cluster.KILL not in kinds:
            kinds.append((await node.receive())[0])
        process.close()
        process.close()
        process.shutdown(0.0)
        assert process.closed

    run(test, key)


@pytest.mark.parametrize(
    ("settings", "headless", "why"),
    [
        ({"data_parallel_size_local": 3}, False, "data_parallel_size_local=3 are more than"),
        ({"data_parallel_start_rank": 1, "data_parallel_size_local": 1}, False, "add --headless"),
        ({"data_parallel_size_local": 1}, False, "data_parallel_address is missing"),
        (
            {"data_parallel_size_local": 1, "data_parallel_address": "h"},
            False,
            "cluster_key_file is missing",
        ),
        ({"data_parallel_address": "h"}, False, "all of data_parallel_size=2 are on this one"),
        ({"data_parallel_size_local": 1}, True, "data_parallel_start_rank=0 is the head node's"),
        ({"data_parallel_start_rank": 1}, True, "are more than data_parallel_size=2"),
    ],
)
def test_settings_that_contradict(settings, headless, why):
    config = EngineConfig.from_kwargs(data_parallel_size=2, **settings)
    with pytest.raises(ConfigError, match=why):
        config.parallel.check(headless=headless)


def test_the_log_does_not_show_the_key(key, caplog):
    caplog.set_level(logging.DEBUG)

    async def test(hub, joined):
        await make_engine(hub, key)

    run(test, key)
    assert key.secret.decode() not in caplog.text + repr(key)
