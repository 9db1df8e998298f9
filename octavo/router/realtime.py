"""Sessions of /v1/realtime that are passed on, message by message, to a server of the session.

A session holds a place at its server until it ends. Each direction waits until the receiver has
taken a message before it reads the next one, so that few messages are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.responses import Response
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from octavo.errors import OctavoError
from octavo.router.pool import Pool, Upstream
from octavo.server.auth import flow_of, private_salt, tenant_of
from octavo.server.errors import UnavailableError, error_status
from octavo.server.middleware import RequestContext
from octavo.server.sockets import (
    GOING_AWAY,
    INTERNAL_ERROR,
    MAX_MESSAGE_BYTES,
    REFUSED,
    TRY_AGAIN_LATER,
    error_text,
    event_text,
)

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from octavo.router.proxy_state import ProxyState

logger = logging.getLogger(__name__)

# Statuses that describe the server rather than the session; 429: it is full.
_ELSEWHERE = frozenset([429, 502, 503, 504])
# Messages of a server that wait for the client.
_MOST_WAITING = 4
# Seconds in which a server confirms the end of a session.
_CLOSE_SECONDS = 2.0
# Headers of the client's own connection, besides those that are never passed on.
_OF_THE_CONNECTION = ("sec-websocket-", "origin")
_TRANSCRIPT = "conversation.item.input_audio_transcription."
_COMMITTED = '{"type":"input_audio_buffer.committed"'
_ENDED = tuple(f'{{"type":"{_TRANSCRIPT}{end}"' for end in ("completed", "failed"))


class SessionRefusedError(OctavoError):
    """Answer of a server that does not accept a session.

    Args:
        answer: the answer.
    """

    def __init__(self, answer: Response) -> None:
        super().__init__(f"The server answered {answer.status_code}.")
        self.answer = answer

    @property
    def event(self) -> str:
        """The event of the error, for a client whose session has begun."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError, KeyError, TypeError):
            found = msgspec.json.decode(self.answer.body)["error"]
            return event_text("error", {"error": {**found, "event_id": None}})
        return error_text(self)


class SocketProxy:
    """Session of a client that a server of a pool serves.

    Args:
        websocket: the connection of the client.
        state: the router.
        headers: headers to pass on.
    """

    def __init__(
        self, websocket: WebSocket, state: ProxyState, headers: list[tuple[str, str]]
    ) -> None:
        self._websocket, self._state = websocket, state
        self._context: RequestContext = websocket.scope["octavo"]
        key = self._context.api_key
        kept = [(n, v) for n, v in headers if not n.startswith(_OF_THE_CONNECTION)]
        names = {name for name, _ in kept}
        if key is not None and not names & {"authorization", "x-api-key"}:  # a browser's protocol
            kept.append(("authorization", f"Bearer {key}"))
        self._headers = kept
        fields = parse_qsl(websocket.url.query, keep_blank_values=True)
        if key is not None:  # each key has its own scope of cached prefixes
            given = dict(fields).get("cache_salt")
            fields = [(name, value) for name, value in fields if name != "cache_salt"]
            fields.append(("cache_salt", private_salt(key, given) or ""))
        self._target = "/v1/realtime" + (f"?{urlencode(fields)}" if fields else "")
        offered = websocket.scope.get("subprotocols", [])
        self.subprotocol = "realtime" if "realtime" in offered else None
        self._num_pending = 0
        """Number of items without a transcript."""
        self._none_pending = asyncio.Event()
        self._none_pending.set()
        self._next: asyncio.Task[Message] | None = None
        """The client's next message, if it is being waited for."""

    @property
    def sender(self) -> str | int | None:
        """Sender of the session: its key, or without several keys a class of addresses."""
        if len(self._state.api_keys) > 1:
            return tenant_of(self._context.api_key)
        return flow_of(self._context.address)

    async def serve(
        self,
        pool: Pool,
        model: str | None,
        turn: AbstractAsyncContextManager[None] | None = None,
        first: str | None = None,
    ) -> None:
        """Pass the session on until it ends.

        Args:
            pool: the servers.
            model: model that the client names.
            turn: context of the session, entered before a server is chosen.
            first: first message of a client whose session has begun here; None: the server begins
                it, and the client is accepted if the server accepts.

        Raises:
            OctavoError: the session was not accepted, and the client has no answer yet.
        """
        begun = first is not None
        try:
            async with AsyncExitStack() as stack:
                async with self._while_client_waits():
                    await stack.enter_async_context(turn or nullcontext())
                    server, connection = await stack.enter_async_context(
                        self._connected(pool, model)
                    )
                if not begun:
                    await self._websocket.accept(self.subprotocol)
                    begun = True
                await self._relay(server, connection, first)
        except WebSocketDisconnect:
            return
        except SessionRefusedError as error:
            if not begun:
                await self._websocket.send_denial_response(error.answer)
                return
            await self.end(error.event, code_for(error.answer.status_code))
        except Exception as error:
            if not begun:
                raise
            await self.end(error_text(error), code_for(error_status(error)))
        finally:
            if self._next is not None:
                self._next.cancel()

    async def end(self, event: str, code: int, reason: str = "") -> None:
        """Send the client a last event, and close its connection."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            if event:
                await self._websocket.send_text(event)
            await self._websocket.close(code, reason)

    @asynccontextmanager
    async def _while_client_waits(self) -> AsyncIterator[None]:
        """Return a context of work that ends if the client goes.

        Raises:
            WebSocketDisconnect: the client has gone.
        """
        if self._websocket.client_state is WebSocketState.CONNECTING:
            await self._websocket.receive()
        following = self._next = asyncio.create_task(self._websocket.receive())
        waiting = True
        try:
            async with asyncio.timeout(None) as timeout:

                def note(task: asyncio.Task[Message]) -> None:
                    if waiting and task.result()["type"] == "websocket.disconnect":
                        timeout.reschedule(asyncio.get_running_loop().time())

                following.add_done_callback(note)
                try:
                    yield
                finally:
                    waiting = False
        except TimeoutError:
            if not timeout.expired():
                raise
            raise WebSocketDisconnect from None

    async def _receive(self) -> Message:
        """Return the next message of the client, or the event of its end."""
        following, self._next = self._next, None
        return await (following or self._websocket.receive())

    # Server

    @asynccontextmanager
    async def _connected(
        self, pool: Pool, model: str | None
    ) -> AsyncIterator[tuple[Upstream, ClientConnection]]:
        """Return a context with a connection to a server that accepts the session.

        Raises:
            SessionRefusedError: no server accepts it.
            UnavailableError: no server can be reached.
        """
        tried: dict[Upstream, int] = {}
        refusal: SessionRefusedError | None = None
        while True:
            server = pool.choose([], tried, None, model)
            if server is None:
                if refusal is not None:
                    raise refusal
                if not await pool.wait_ready(tried, self._state.router.failover_timeout):
                    raise UnavailableError(
                        "No server could serve the session: "
                        + ("none is ready" if not tried else "each failed")
                        + "; try again later."
                    )
                continue
            epoch = server.epoch
            with pool.hold(server, 1) as hold:
                try:
                    connection = await self._connect(server)
                except SessionRefusedError as error:
                    status = error.answer.status_code
                    lacks = status == 404 and model is not None and pool.note_lack(server, model)
                    if status not in _ELSEWHERE and not lacks:
                        raise
                    refusal = error
                    self._state.metrics.retries.labels("refused").inc()
                except (OSError, EOFError) as error:  # also a timeout
                    logger.warning(
                        "session is sent to another server",
                        extra={"server": server.name, "reason": str(error)},
                    )
                    self._state.metrics.retries.labels("unreachable").inc()
                    pool.suspect(server)
                else:
                    hold.begin()
                    try:
                        yield server, connection
                    finally:
                        await _close(connection)
                    return
            tried[server] = epoch

    async def _connect(self, server: Upstream) -> ClientConnection:
        """Open a connection.

        Raises:
            SessionRefusedError: the server answered without accepting the session.
            OSError: it cannot be reached, or broke the connection.
        """
        # Without the package, no WebSocket reaches this.
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.typing import Subprotocol

        class Connect(connect):
            def process_redirect(self, exc: Exception) -> Exception:
                return exc  # no other address gets the key

        place: dict[str, Any] = {} if server.socket is None else {"unix": True}
        if server.socket is not None:
            place["path"] = server.socket
        try:
            async with server.guard():
                return await Connect(
                    "ws" + server.url.removeprefix("http") + self._target,
                    subprotocols=None if self.subprotocol is None else [Subprotocol("realtime")],
                    compression=None,
                    additional_headers=server.with_key(self._headers),
                    user_agent_header=None,
                    proxy=None,
                    open_timeout=None,
                    ping_interval=None,  # the pool's probes find a server that is silent
                    close_timeout=_CLOSE_SECONDS,
                    max_size=MAX_MESSAGE_BYTES,
                    max_queue=_MOST_WAITING,
                    **place,
                )
        except InvalidStatus as error:
            answer = error.response
            raise SessionRefusedError(
                Response(bytes(answer.body or b""), answer.status_code, _kept(answer.headers))
            ) from None
        except InvalidHandshake as error:
            raise ConnectionError(str(error)) from None

    # Messages

    async def _relay(
        self, server: Upstream, connection: ClientConnection, first: str | None
    ) -> None:
        """Pass messages on in both directions until one side ends, or the session must end."""
        sending = asyncio.create_task(self._to_server(server, connection, first))
        receiving = asyncio.create_task(self._to_client(server, connection, first is not None))
        stopping = asyncio.create_task(self.must_end())
        tasks = sending, receiving, stopping
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not (sending.done() or receiving.done()):
                sending.cancel()
                idle = asyncio.create_task(self._none_pending.wait())
                await asyncio.wait({idle, receiving}, return_when=asyncio.FIRST_COMPLETED)
                idle.cancel()
                if not receiving.done():
                    await self.end(error_text(stopping.result()), GOING_AWAY)
                    return
            if sending.done() and not sending.cancelled() and not receiving.done():
                if sending.exception() is None:
                    return  # the client has gone
                # Its last events may say why the server ended the connection.
                await asyncio.wait({receiving}, timeout=_CLOSE_SECONDS)
            if receiving.done():
                code, reason = receiving.result()
                if code is not None:
                    await self.end("", code, reason)
                    return
            lost = UnavailableError(
                "The server of the session was lost; begin another session, and send the sound "
                "without a transcript again."
            )
            await self.end(error_text(lost), INTERNAL_ERROR)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def must_end(self) -> OctavoError:
        """Wait until the session must end after the transcripts of its items; return why."""
        await self._state.drain_began.wait()
        return UnavailableError("The server is shutting down; the session ends.")

    async def _to_server(
        self, server: Upstream, connection: ClientConnection, first: str | None
    ) -> None:
        """Pass on what the client sends; return when it ends the session."""
        if first is not None:
            async with server.guard():
                await connection.send(first)
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            refusal = None if text is None else self.check_message(text)
            if refusal is not None:
                await self._websocket.send_text(refusal)
                continue
            async with server.guard():
                await connection.send(message["bytes"] if text is None else text)

    def check_message(self, text: str) -> str | None:
        """Return the event of the error of a message that is not passed on; None: it is."""
        return None

    async def _to_client(
        self, server: Upstream, connection: ClientConnection, begun: bool
    ) -> tuple[int | None, str]:
        """Pass on what the server sends.

        Args:
            server: the server.
            connection: the connection to it.
            begun: True if the client has a `session.created` already.

        Returns:
            The code and the reason with which it ends the session; the code None: it was lost.
        """
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                async with server.guard():
                    message = await connection.recv()
            except ConnectionClosed as closed:
                frame = closed.rcvd
                # 1012: uvicorn ends connections without their sessions.
                if frame is None or frame.code in (1005, 1012):
                    return None, ""
                return frame.code, frame.reason
            except TimeoutError:
                return None, ""
            if begun:
                begun = False
                continue
            if isinstance(message, bytes):
                await self._websocket.send_bytes(message)
                continue
            if message.startswith(_COMMITTED):
                self._num_pending += 1
            elif message.startswith(_ENDED):
                self._num_pending -= 1
            if self._num_pending > 0:
                self._none_pending.clear()
            else:
                self._none_pending.set()
            await self._websocket.send_text(message)


async def _close(connection: ClientConnection) -> None:
    """End a connection, even if its server does not read what was sent."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await connection.close(GOING_AWAY)
    connection.transport.abort()


def code_for(status: int) -> int:
    """Return the code that closes a session for an error with a HTTP status."""
    if status in _ELSEWHERE:
        return TRY_AGAIN_LATER
    return REFUSED if status < 500 else INTERNAL_ERROR


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a refusal that describe it."""
    names = ("content-type", "retry-after", "www-authenticate")
    return {name: headers[name] for name in names if name in headers}
