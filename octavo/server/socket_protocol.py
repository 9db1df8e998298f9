"""WebSockets of uvicorn with bounds on the time of clients that do not read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from octavo.server.protocol import SEND_TIMEOUT


class SocketProtocol(WebSocketsSansIOProtocol):
    """Connection that ends if its client does not read, or does not answer pings.

    Args:
        args: arguments of uvicorn.
        kwargs: arguments of uvicorn.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timeout of a client that reads more slowly than events are made."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, as the client reads again."""
        super().resume_writing()
        self._stop_timer()

    async def send(self, message: Any) -> None:
        """Send a message; the answer to a refused client ends the handshake."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """End a connection without a sign of life.

        If messages of the client still wait to be read, the sign may be behind them.
        """
        if self.read_paused:
            self.pong_timer = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self.transport.abort()  # the client would not read the rest

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """End the connection some time after its session, even if its client does not read."""
        super().on_task_complete(task)
        self.loop.call_later(self.close_timeout + 1, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
