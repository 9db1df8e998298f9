"""HTTP/1.1 protocol of uvicorn with bounds on the size and time of what clients send.

The bounds are nginx's. They apply before a request is complete, so before any key is checked.
"""

from __future__ import annotations

import asyncio
import http
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # not in uvloop's stub

from octavo.errors import RequestError
from octavo.server.errors import ProtocolError, error_response

MAX_URL_BYTES = 8 * 1024
MAX_HEAD_BYTES = 32 * 1024
"""Maximum size of all headers of a request, including trailers."""
MAX_HEADERS = 100
MAX_PIPELINED = 16
"""Maximum number of requests that wait on a connection while one is answered."""
HEAD_TIMEOUT = 10.0
"""Seconds in which a request's head, and before it a TLS handshake, must have arrived."""
KEEP_ALIVE_TIMEOUT = 75
"""Seconds that a connection may be idle between two requests."""
SEND_TIMEOUT = 60.0
"""Seconds that an answer may wait for a client that does not read it."""


class ConnectionCounter:
    """Counter of a server's connections by client address.

    Args:
        maximum: maximum connections for one address; 0: no limit.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._counts: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection; return False if its client has too many."""
        self._counts[address] += 1
        return self.maximum == 0 or self._counts[address] <= self.maximum

    def remove(self, address: str) -> None:
        """Forget a connection that has ended, including rejected ones."""
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class TlsProtocol(SSLProtocol):  # type: ignore[misc]  # see the import
    """TLS connection; it counts from the moment the TCP connection is accepted.

    Args:
        connections: the counter of the server.
        protocol: receives the decrypted data of the client.
        context: holds the certificate.
    """

    def __init__(
        self, connections: ConnectionCounter, protocol: Protocol, context: ssl.SSLContext
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            protocol,
            context,
            None,
            server_side=True,
            ssl_handshake_timeout=HEAD_TIMEOUT,
        )
        self._connections = connections
        self._client: tuple[str, int] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Count the connection, and close it if its client has too many."""
        self._client = get_remote_addr(transport)
        if self._client is not None and not self._connections.add(self._client[0]):
            transport.abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        if self._client is not None:
            self._connections.remove(self._client[0])


class Protocol(HttpToolsProtocol):
    """Connection of a client.

    Args:
        connections: the counter of the server; None: `TlsProtocol` counts the connection.
        args: arguments of uvicorn.
        kwargs: arguments of uvicorn.
    """

    def __init__(self, connections: ConnectionCounter | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._in_head = False
        self._header_bytes = 0
        self._unheard_bytes = 0
        """Bytes since the parser last called: it keeps a header until the header is complete."""
        self._refusal: RequestError | None = None
        self._deaf = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Count the connection, and reject it if its client has too many."""
        super().connection_made(transport)
        counter = self._connections
        if counter is not None and self.client is not None and not counter.add(self.client[0]):
            self._refuse(
                ProtocolError(
                    429,
                    f"More than {counter.maximum} connections of one client "
                    "(--max-connections-per-client).",
                )
            )
            return
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        if self._connections is not None and self.client is not None:
            self._connections.remove(self.client[0])

    def data_received(self, data: bytes) -> None:
        """Parse the received data, and start the timeout for the rest of a request's head."""
        if self._deaf:
            return
        self._unheard_bytes += len(data)
        super().data_received(data)
        if self._deaf or self.transport.is_closing():
            return
        if self._unheard_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif (self._in_head or not self._is_answering()) and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)

    def pause_writing(self) -> None:
        """Start the timeout of a client that reads more slowly than the answer is made."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, as the client reads again."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def handle_websocket_upgrade(self) -> None:
        """Let a protocol of WebSockets take over the connection, which stays counted."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._deaf = True  # there are no more heads, for which `data_received` would set a timeout
        super().handle_websocket_upgrade()
        counter, client = self._connections, self.client
        if counter is None or client is None:
            return
        socket: Any = self.transport.get_protocol()
        end = socket.connection_lost

        def connection_lost(exc: Exception | None) -> None:
            counter.remove(client[0])
            end(exc)

        socket.connection_lost = connection_lost

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_head = True
        self._header_bytes = self._unheard_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Add a piece of the URL."""
        super().on_url(url)
        self._unheard_bytes = 0
        if len(self.url) > MAX_URL_BYTES:
            self._refuse_in_parser(
                ProtocolError(414, f"The URL is longer than {MAX_URL_BYTES} bytes.")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or a trailer."""
        super().on_header(name, value)
        self._unheard_bytes = 0
        self._header_bytes += len(name) + len(value) + len(": \r\n")
        if self._header_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_in_parser(_too_large())

    def on_headers_complete(self) -> None:
        """Accept a request with a complete head; its body may follow."""
        self._in_head = False
        self._unheard_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse_in_parser(
                ProtocolError(400, f"More than {MAX_PIPELINED} requests wait on one connection.")
            )
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a piece of a body."""
        super().on_body(body)
        self._unheard_bytes = 0

    def on_message_complete(self) -> None:
        """End a request."""
        super().on_message_complete()
        self._unheard_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """End the connection since the parser failed."""
        self._refuse(self._refusal or ProtocolError(400, msg))

    # Rejections

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_in_parser(self, error: RequestError) -> None:
        """Stop the parser; uvicorn then calls `send_400_response`."""
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        """Send the error and end the connection.

        Complete earlier requests are answered first, and then the error cannot be sent.
        """
        if self._is_answering() and not self.cycle.more_body:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        if not self._is_answering() or not (self.pipeline or self.cycle.response_started):
            self.transport.write(_response(error))
        self.transport.close()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:  # the server is the one that waits
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)
        elif self._in_head:
            self._refuse(
                ProtocolError(
                    408, f"The head of the request did not arrive within {HEAD_TIMEOUT:.0f} s."
                )
            )
        else:
            self.transport.close()


def make_protocol(
    max_connections: int, context: ssl.SSLContext | None = None
) -> Callable[..., asyncio.BaseProtocol]:
    """Return the factory of a server's connections, as uvicorn calls it.

    Args:
        max_connections: maximum connections for one client address; 0: no limit.
        context: holds the certificate; None: no TLS.
    """
    connections = ConnectionCounter(max_connections)

    def protocol(*args: Any, **kwargs: Any) -> asyncio.BaseProtocol:
        if context is None:
            return Protocol(connections, *args, **kwargs)
        tls: asyncio.BaseProtocol = TlsProtocol(
            connections, Protocol(None, *args, **kwargs), context
        )
        return tls

    return protocol


def _too_large() -> ProtocolError:
    return ProtocolError(
        431,
        f"The request has more than {MAX_HEAD_BYTES} bytes of headers, or more than {MAX_HEADERS} "
        "of them.",
    )


def _response(error: RequestError) -> bytes:
    """Return the whole answer to an invalid request."""
    response = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])
