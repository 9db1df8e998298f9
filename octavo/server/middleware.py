"""Middleware of every request: its id, its key, its errors, its line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from octavo.errors import RequestError
from octavo.frontend.traces import read_trace_headers
from octavo.server.auth import OPEN_PATHS
from octavo.server.errors import (
    ClientDisconnectError,
    UnavailableError,
    error_response,
    error_writer,
    log_unexpected,
    show,
)
from octavo.server.http_state import HttpState
from octavo.server.stories import SHORTEST_BLOCK, Story
from octavo.server.ui import is_page
from octavo.system.logs import REQUEST_ID

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for a client that disconnected; it is only logged."""

SWITCHING_PROTOCOLS = 101
"""Status of an accepted WebSocket; it is only logged."""

_KEY_PROTOCOL = "openai-insecure-api-key."


@dataclass(slots=True)
class RequestContext:
    """Data of one HTTP request except its body."""

    request_id: str
    arrival: float
    """Arrival in seconds of `time.monotonic`."""
    address: str | None = None
    """Address of the client's machine, or of the proxy before it; None: unknown."""
    api_key: str | None = field(default=None, repr=False)
    is_admin: bool = False
    """True if the key is the operator's."""
    ignored_fields: list[str] = field(default_factory=list)
    """Fields of the body that are unknown or have no effect here."""
    stripped: list[str] = field(default_factory=list)
    """Fields of the body of which a part was left out (--strip-client-noise)."""
    deadline_ms: int | None = None
    max_ttft_ms: int | None = None
    """Limits from headers; those of the body have precedence."""
    trace_headers: dict[str, str] = field(default_factory=dict)
    """W3C's headers of a trace that the request continues."""
    body_bytes: int = 0
    """Number of received bytes of the body."""
    status: int | None = None
    background: bool = False
    """True for a line of a batch."""
    is_aborted: bool = False
    """True if the operator stopped an answer before it was complete."""
    created: int | None = None
    """Time of the answer in seconds since 1970; None: now."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    received: float | None = None
    """Second of `time.monotonic` at which the body had been read."""
    story: Story | None = None
    """Record for `explain`."""


def context_of(request: Request) -> RequestContext:
    """Return the context that the middleware made for a request."""
    context = request.scope["octavo"]
    assert isinstance(context, RequestContext)
    return context


class RequestMiddleware:
    """Middleware that sets ids and contexts, checks host and key, and answers errors."""

    def __init__(self, app: ASGIApp, state: HttpState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context = RequestContext(
            _request_id(headers.get("x-request-id")), time.monotonic(), _address(scope, headers)
        )
        scope["octavo"] = context
        token = REQUEST_ID.set(context.request_id)
        path, root = scope["path"], scope.get("root_path", "")
        # As the router sees the path: a proxy may leave its own path in front.
        own_path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        probe = own_path in OPEN_PATHS or (
            self.state.config.ui and is_page(scope["method"], own_path, headers.get("accept"))
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = context.request_id
                if context.ignored_fields:
                    answer["X-Octavo-Ignored-Fields"] = ", ".join(context.ignored_fields)
                if context.stripped:
                    answer["X-Octavo-Stripped"] = ", ".join(context.stripped)
            story = context.story
            if story is None:
                await send(message)
                return
            begin = time.monotonic()
            await send(message)
            end = time.monotonic()
            if end - begin >= SHORTEST_BLOCK:
                story.note_sending(begin, end)

        self.state.num_active += not probe
        try:
            self.state.allowed_hosts.check(headers.getlist("host"))
            if not probe:
                given = headers.get("authorization")
                if given is None and (key := headers.get("x-api-key")) is not None:
                    given = f"Bearer {key}"
                context.api_key, context.is_admin = self.state.api_keys.check(
                    None if given is None else given.encode("latin-1")
                )
                if self.state.draining:
                    raise UnavailableError("The server is shutting down; try another one.")
                context.deadline_ms = _milliseconds(headers, "X-Deadline-Ms")
                context.max_ttft_ms = _milliseconds(headers, "X-Max-TTFT-Ms")
                context.trace_headers = read_trace_headers(headers)
            await self.app(scope, receive, send_with_id)
        except ClientDisconnectError:
            context.status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            log_unexpected(error)
            if context.status is not None:
                raise  # too late for an answer: the connection gets closed
            response = error_response(error, error_writer(path))
            await response(scope, receive, send_with_id)
        finally:
            self.state.num_active -= not probe
            self.state.body_bytes -= context.body_bytes
            end = time.monotonic()
            if context.story is not None:
                context.story.end_http(context.status, end)
            _log_access(scope, context, end, probe or self._quiet(scope["path"]))
            REQUEST_ID.reset(token)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket; an error before it is accepted is answered as that of a request."""
        headers = Headers(scope=scope)
        context = RequestContext(
            _request_id(headers.get("x-request-id")), time.monotonic(), _address(scope, headers)
        )
        scope["octavo"] = context
        token = REQUEST_ID.set(context.request_id)
        accepted = False

        async def note(message: Message) -> None:
            nonlocal accepted
            if message["type"] == "websocket.accept":
                accepted, context.status = True, SWITCHING_PROTOCOLS
            elif message["type"] == "websocket.http.response.start":
                context.status = message["status"]
            await send(message)

        self.state.num_active += 1
        try:
            self.state.allowed_hosts.check(headers.getlist("host"))
            given = headers.get("authorization") or _bearer(scope, headers)
            context.api_key, context.is_admin = self.state.api_keys.check(
                None if given is None else given.encode("latin-1")
            )
            if self.state.draining:
                raise UnavailableError("The server is shutting down; try another one.")
            await self.app(scope, receive, note)
        except (ClientDisconnectError, WebSocketDisconnect):
            pass
        except Exception as error:
            log_unexpected(error)
            if accepted:
                raise
            await error_response(error)(scope, receive, note)
        finally:
            self.state.num_active -= 1
            self.state.body_bytes -= context.body_bytes
            _log_access(scope, context, time.monotonic(), self._quiet(scope["path"]))
            REQUEST_ID.reset(token)

    def _quiet(self, path: str) -> bool:
        """Return True if the operator wants no log lines about requests to a path."""
        config = self.state.config
        paths = (config.disable_access_log_for_endpoints or "").split(",")
        return config.disable_uvicorn_access_log or path in map(str.strip, paths)


def _address(scope: Scope, headers: Headers) -> str | None:
    """Return the address of the client's machine; None: unknown.

    A client of a Unix socket has no address. It can be a proxy that names its own client, last in
    the header X-Forwarded-For. uvicorn reads this header of proxies with an address.
    """
    if scope.get("client"):
        address: str = scope["client"][0]
        return address
    return headers.get("x-forwarded-for", "").rpartition(",")[2].strip()[:64] or None


def _request_id(given: str | None) -> str:
    """Return the client's id if it is valid for logs and headers, otherwise a new one."""
    if given is not None and re.fullmatch(r"[!-~]{1,128}", given):
        return given
    return uuid.uuid4().hex


def _bearer(scope: Scope, headers: Headers) -> str | None:
    """Return the key of a WebSocket without an Authorization header; None without a key.

    A browser cannot set headers, so that OpenAI's clients there name a protocol with the key.
    """
    names = scope.get("subprotocols", [])
    keys = [name.removeprefix(_KEY_PROTOCOL) for name in names if name.startswith(_KEY_PROTOCOL)]
    key = headers.get("x-api-key") or next(iter(keys), None)
    return None if key is None else f"Bearer {key}"


def _milliseconds(headers: Headers, name: str) -> int | None:
    """Return the value of a header that limits the time of a request.

    Raises:
        RequestError: the value is not a valid number of milliseconds.
    """
    given = headers.get(name)
    if given is None:
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,14}", given):
        raise RequestError(
            f"The header {name} is {show(given)}; give whole milliseconds, at least 1 and at most "
            "15 digits.",
            name,
        )
    return int(given)


def _log_access(scope: Scope, context: RequestContext, end: float, quiet: bool) -> None:
    fields: dict[str, object] = {
        "status": context.status,
        "latency_ms": round((end - context.arrival) * 1000, 1),
        "client": context.address,
    }
    if context.prompt_tokens is not None:
        fields["prompt_tokens"] = context.prompt_tokens
        fields["completion_tokens"] = context.completion_tokens
    # The raw path is still percent-encoded, so it cannot hold a line break.
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    level = logging.DEBUG if quiet else logging.INFO
    logger.log(level, "%s %s", scope.get("method", "WEBSOCKET"), path, extra=fields)
