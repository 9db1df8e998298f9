"""Connections of WebSockets whose clients do not read, or have gone without a word."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("websockets", reason="websockets is not installed")

from octavo.server import socket_protocol
from octavo.server.socket_protocol import SocketProtocol


class Transport:
    """Connection that notes its end."""

    aborted = closed = False

    def __init__(self):
        self.written = []

    def write(self, data):
        self.written.append(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True


def connection():
    """Return a protocol after `connection_made`, and its transport."""
    config = SimpleNamespace(
        loaded=True,
        loaded_app=None,
        root_path="",
        asgi_version="3.0",
        ws_max_size=100,
        ws_per_message_deflate=False,
        ws_ping_interval=20,
        ws_ping_timeout=20,
    )
    shared = SimpleNamespace(connections=set(), tasks=set(), default_headers=[])
    made = SocketProtocol(config, shared, {}, asyncio.get_running_loop())
    made.transport = Transport()
    return made, made.transport


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(socket_protocol, "SEND_TIMEOUT", 0.01)

    async def main():
        slow, transport = connection()
        slow.pause_writing()
        while not transport.aborted:
            await asyncio.sleep(0.01)
        patient, transport = connection()
        monkeypatch.setattr(socket_protocol, "SEND_TIMEOUT", 9999)
        patient.pause_writing()
        timer = patient._send_timer
        patient.resume_writing()
        assert timer.cancelled()
        assert not transport.aborted

    asyncio.run(main())


@pytest.mark.parametrize("paused", [True, False])
def test_a_sign_of_life(paused):
    """It may wait behind messages that the session has not read yet."""

    async def main():
        made, transport = connection()
        made.read_paused = paused
        made.send_keepalive_ping = made.conn.fail = lambda *_: None
        made.keepalive_timeout()
        assert transport.aborted == (not paused)
        assert (made.ping_timer is not None) == paused
        made.stop_keepalive()

    asyncio.run(main())
