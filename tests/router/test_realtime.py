"""Sessions of /v1/realtime through a router, with servers in this process."""

import asyncio
import contextlib
import json
import socket

import pytest

from octavo.config import ServerConfig
from octavo.router.app import build_app
from octavo.router.config import RouterConfig
from octavo.router.pool import Upstream
from octavo.router.realtime import SocketProxy
from octavo.router.state import RouterState
from octavo.server import realtime_shares
from octavo.server.serve import serve_app

client = pytest.importorskip("websockets.asyncio.client", reason="websockets is not installed")
server = pytest.importorskip("websockets.asyncio.server")
exceptions = pytest.importorskip("websockets.exceptions")

KEY = {"Authorization": "Bearer k1"}
OPEN = {"type": "session.created"}
COMMITTED = {"type": "input_audio_buffer.committed"}
COMPLETED = {"type": "conversation.item.input_audio_transcription.completed"}


def text(event):
    return json.dumps(event, separators=(",", ":"))


class FakeEar:
    """Server of sessions: it sends back each message, and does what the messages "!..." ask.

    Args:
        status: status with which it refuses sessions; None: it accepts them.
    """

    def __init__(self, status=None):
        self.status, self.sessions, self.ready, self.greets = status, [], True, True

    async def __aenter__(self):
        self.made = await server.serve(
            self._serve,
            "127.0.0.1",
            0,
            process_request=self._answer,
            select_subprotocol=lambda _, offered: "realtime" if "realtime" in offered else None,
            compression=None,
            max_size=2**21,
        )
        self.url = f"http://127.0.0.1:{self.made.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self.made.close()

    def _answer(self, connection, request):
        if request.path == "/v1/models":
            return connection.respond(404, "")
        if request.path != "/ready":
            self.sessions.append((request.path, request.headers))
            if self.status is not None:
                answer = connection.respond(self.status, text({"error": {"message": "no room"}}))
                answer.headers["Retry-After"] = "7"
                return answer
            return None
        return connection.respond(200 if self.ready else 503, "")

    async def _serve(self, connection):
        if self.greets:
            await connection.send(text(OPEN))
        while True:
            try:
                message = await connection.recv()
            except exceptions.ConnectionClosed:
                return
            if message == "!die":
                connection.transport.abort()
            elif message == "!close":
                await connection.close(4000, "enough")
            elif message == "!flood":
                with contextlib.suppress(exceptions.ConnectionClosed):
                    while True:
                        await connection.send("x" * 2**16)
            elif message == "!commit":
                await connection.send(text(COMMITTED))
            elif message == "!complete":
                await connection.send(text(COMPLETED))
            else:
                await connection.send(message)


class Routed:
    """Router that listens on a port.

    Args:
        ears: its servers.
        keys: its API keys.
    """

    def __init__(self, *ears, keys=("k1", "k2"), **settings):
        self.ears, self.settings, self.keys = ears, settings, keys

    async def __aenter__(self):
        config = ServerConfig(api_key=list(self.keys))
        router = RouterConfig(
            health_check_interval=0.02, failover_timeout=60, health_check_timeout=60
        )
        self.state = RouterState(config, router, {})
        for number, ear in enumerate(self.ears):
            self.state.answering.add(Upstream(f"s{number}", ear.url, **self.settings))
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
        app, heard = build_app(self.state), []
        self.serving = asyncio.create_task(serve_app(self.state, app, listener, heard.append))
        while not all(u.ready for u in self.state.answering.upstreams):
            await asyncio.sleep(0.01)
        (self.signal,) = heard
        return self

    async def __aexit__(self, *error):
        self.state.on_failure()
        await self.serving
        await self.state.close()

    def connect(self, query="", **options):
        options = {"additional_headers": KEY, "compression": None} | options
        return client.connect(self.address + query, **options)

    @property
    def held(self):
        return [(u.num_running, u.num_requests) for u in self.state.answering.upstreams]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def last_of(session):
    """Return the last event, the code and the reason of a session that ends."""
    events = []
    with contextlib.suppress(exceptions.ConnectionClosed):
        async with asyncio.timeout(60):
            while True:
                events.append(json.loads(await session.recv()))
    return events[-1] if events else None, session.close_code, session.close_reason


def run(main):
    asyncio.run(main())


def test_messages_in_both_directions():
    async def main():
        async with FakeEar() as ear, Routed(ear) as router:
            async with router.connect("?intent=a&model=m", subprotocols=["realtime"]) as session:
                assert session.subprotocol == "realtime"
                assert json.loads(await session.recv()) == OPEN
                for message in ("a", "b" * (2**20 - 100), b"bytes"):
                    await session.send(message)
                    assert await session.recv() == message
                assert router.held == [(1, 1)]
                await session.send("!close")
                assert await last_of(session) == (None, 4000, "enough")
            await until(lambda: router.held == [(0, 0)])
            async with router.connect() as session:
                await session.recv()
            await until(lambda: router.held == [(0, 0)])
        (path, headers), (other, _) = ear.sessions
        assert path.startswith("/v1/realtime?intent=a&model=m&cache_salt=")
        assert other.startswith("/v1/realtime?cache_salt=")
        assert headers["Authorization"] == "Bearer k1"
        assert "Origin" not in headers

    run(main)


def test_the_key_of_a_browser_and_of_the_servers():
    async def main():
        protocols = ["realtime", "openai-insecure-api-key.k2"]
        options = {"subprotocols": protocols, "additional_headers": {}}
        async with FakeEar() as ear:
            for settings in ({}, {"api_key": "own"}):
                async with Routed(ear, **settings) as router, router.connect(**options) as session:
                    assert json.loads(await session.recv()) == OPEN
        assert [h["Authorization"] for _, h in ear.sessions] == ["Bearer k2", "Bearer own"]
        assert all("k2" not in h["Sec-WebSocket-Protocol"] for _, h in ear.sessions)

    run(main)


def test_refusals():
    async def main():
        async with FakeEar(400) as ear, Routed(ear) as router:
            cases = (
                ({}, 400, b"no room"),
                ({"additional_headers": {}}, 401, b"No API key"),
                ({"origin": "http://evil.example"}, 403, b"evil"),
            )
            for options, status, message in cases:
                with pytest.raises(exceptions.InvalidStatus) as caught:
                    await router.connect(**options)
                assert caught.value.response.status_code == status
                assert message in caught.value.response.body
            assert len(ear.sessions) == 1
            assert router.held == [(0, 0)]

    run(main)


def test_another_server_takes_what_one_cannot():
    async def main():
        async with FakeEar(429) as full, FakeEar() as ear, FakeEar() as dead:
            async with Routed(full, dead, ear) as router:
                dead.ready = False
                dead.made.close()
                for _ in range(3):
                    async with router.connect() as session:
                        assert json.loads(await session.recv()) == OPEN
            assert len(ear.sessions) == 3
            async with Routed(full) as router:
                with pytest.raises(exceptions.InvalidStatus) as caught:
                    await router.connect()
                assert caught.value.response.status_code == 429
                assert caught.value.response.headers["Retry-After"] == "7"

    run(main)


def test_a_lost_server_ends_its_sessions():
    async def main():
        async with (
            FakeEar() as ear,
            Routed(ear) as router,
            router.connect() as session,
            router.connect() as other,
        ):
            await session.send("!die")
            event, code, _ = await last_of(session)
            assert (event["error"]["code"], code) == ("unavailable", 1011)
            assert "was lost" in event["error"]["message"]
            await other.recv()
            await other.send("still here")
            assert await other.recv() == "still here"

    run(main)


def test_a_router_that_stops_waits_for_transcripts():
    async def main():
        async with (
            FakeEar() as ear,
            Routed(ear) as router,
            router.connect() as idle,
            router.connect() as busy,
        ):
            await busy.send("!commit")
            for _ in range(2):
                await busy.recv()
            await busy.send("!wait")
            await busy.recv()
            router.signal(15)
            event, code, _ = await last_of(idle)
            assert (event["error"]["code"], code) == ("unavailable", 1001)
            await until(lambda: router.held == [(1, 1)])  # the item has no transcript
            await until(lambda: len(ear.made.connections) == 1)
            (connection,) = ear.made.connections
            await connection.send(text(COMPLETED))
            assert json.loads(await busy.recv()) == COMPLETED
            event, code, _ = await last_of(busy)
            assert (event["error"]["code"], code) == ("unavailable", 1001)

    run(main)


def test_a_client_that_does_not_read_holds_little_memory(monkeypatch):
    monkeypatch.setattr("octavo.server.socket_protocol.SEND_TIMEOUT", 0.5)

    async def main():
        async with FakeEar() as ear, Routed(ear) as router:
            session = await router.connect(max_queue=1, close_timeout=0.1)
            await session.send("!flood")
            session.transport.pause_reading()
            async with router.connect() as other:
                await other.recv()
                await other.send("a")
                assert await other.recv() == "a"
                await until(lambda: router.held == [(1, 1)])  # it has been ended
            session.transport.abort()

    run(main)


def test_a_server_that_does_not_read_loses_its_sessions(monkeypatch):
    monkeypatch.setattr("octavo.router.realtime._CLOSE_SECONDS", 0.2)
    connect, made = SocketProxy._connect, []

    async def note(self, upstream):
        made.append(await connect(self, upstream))
        return made[-1]

    monkeypatch.setattr(SocketProxy, "_connect", note)

    async def flood(session):
        while True:
            await session.send("x" * 2**16)

    async def main():
        async with FakeEar() as ear, Routed(ear) as router, router.connect() as session:
            await session.recv()
            (connection,), (upstream,) = ear.made.connections, router.state.answering.upstreams
            connection.transport.pause_reading()
            sending = asyncio.create_task(flood(session))
            await until(lambda: made[0].paused)
            upstream.give_up()  # as probes without an answer do
            event, code, _ = await last_of(session)
            assert (event["error"]["code"], code) == ("unavailable", 1011)
            await until(lambda: router.held == [(0, 0)])
            await asyncio.gather(sending, return_exceptions=True)
            connection.transport.abort()

    run(main)


def test_places_of_keys(monkeypatch):
    """A router has places for the sessions of all its servers."""
    monkeypatch.setattr(realtime_shares, "MAX_SESSIONS", 3)

    async def main():
        async with (
            FakeEar() as ear,
            Routed(ear, ear, ear) as router,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(8):
                await stack.enter_async_context(router.connect())
            with pytest.raises(exceptions.InvalidStatus) as caught:
                await router.connect()
            assert caught.value.response.status_code == 429
            assert b"This client has 8 of 8 sessions" in caught.value.response.body
            other = {"Authorization": "Bearer k2"}
            async with router.connect(additional_headers=other) as session:
                assert json.loads(await session.recv()) == OPEN

    run(main)
