"""Limits, events and forms of requests that all processes with WebSockets share."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from octavo.server.errors import RouteError, error_json, log_unexpected
from octavo.server.middleware import RequestContext

MAX_MESSAGE_BYTES = 2**20
"""Most bytes of a message of a client."""
IDLE_SECONDS = 300.0
"""Seconds without new sound after which a session ends."""
GOING_AWAY, REFUSED, INTERNAL_ERROR, TRY_AGAIN_LATER = 1001, 1008, 1011, 1013
"""Codes with which a server closes a session (RFC 6455, section 7.4)."""


def socket_protocol() -> Any:
    """Return the protocol of WebSockets for uvicorn; "none" without the package websockets."""
    if find_spec("websockets") is None:
        return "none"
    from octavo.server.socket_protocol import SocketProtocol

    return SocketProtocol


async def needs_websocket(request: Request) -> Response:
    """Reject a request that is no WebSocket."""
    raise RouteError(
        404, "/v1/realtime is for WebSockets, at a server that has octavo[audio] installed."
    )


def as_request(websocket: WebSocket, context: RequestContext) -> Request:
    """Return the request that a part of a session is for the rest of the server."""
    return Request(dict(websocket.scope, type="http", method="POST", octavo=context))


def new_id(kind: str) -> str:
    """Return a new id, such as "event_...", of an event or item."""
    return f"{kind}_{uuid.uuid4().hex[:20]}"


def event_text(kind: str, fields: Mapping[str, Any]) -> str:
    """Return an event as JSON, which begins with its type."""
    event = {"type": kind, "event_id": new_id("event"), **fields}
    return msgspec.json.encode(event).decode()


def error_text(error: BaseException, event_id: str | None = None) -> str:
    """Return the event of an error, which is logged if no client caused it.

    Args:
        error: the error.
        event_id: id of the client's event that has it.
    """
    log_unexpected(error)
    shown = msgspec.json.decode(error_json(error))["error"]
    return event_text("error", {"error": {**shown, "event_id": event_id}})
