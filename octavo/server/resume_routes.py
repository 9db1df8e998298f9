"""Routes that resume a stream: GET /v1/streams/{stream_id}, or POST with Last-Event-ID."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import read_body
from octavo.server.errors import show
from octavo.server.generation import reading
from octavo.server.middleware import context_of
from octavo.server.state import state_of

_HEADER = "Last-Event-ID"
# No stream has more events, and parsing more digits would take long.
_MAX_DIGITS = 15

Endpoint = Callable[[Request], Awaitable[Response]]


def resumable(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint so that a POST with Last-Event-ID resumes its stream."""

    @wraps(endpoint)
    async def continue_or_begin(request: Request) -> Response:
        if not request.headers.get(_HEADER):
            return await endpoint(request)
        await read_body(request, state_of(request).config.max_request_bytes)
        name, number = _last_event(request)
        return _continue(request, name, number, _HEADER)

    return continue_or_begin


async def get_stream(request: Request) -> Response:
    """Resume a stream (--resume-grace) at event `from`, or after Last-Event-ID.

    Several clients may read the same stream. Status 204: the stream has no more events.
    """
    name = request.path_params["stream_id"]
    if request.headers.get(_HEADER):
        given, number = _last_event(request)
        if given != name:
            raise RequestError(
                f"{_HEADER} names the stream {show(given)}, but the path names {show(name)}.",
                _HEADER,
            )
        return _continue(request, name, number, _HEADER)
    asked = request.query_params.get("from", "0")
    return _continue(request, name, _number(asked, "from"), "from")


def _continue(request: Request, name: str, number: int, param: str) -> Response:
    state = state_of(request)
    stream = state.streams.find(name, context_of(request).api_key)
    stream.check(number, param)
    if stream.finished and number == stream.num_events:
        return Response(status_code=204)  # a browser's EventSource then stops reconnecting
    assert state.engine is not None  # it makes the stream
    state.engine.metrics.record_resume()
    return reading(state, stream, number)


def _last_event(request: Request) -> tuple[str, int]:
    """Return the stream that Last-Event-ID names, and the number of the next event."""
    name, _, number = request.headers[_HEADER].rpartition(":")
    return name, _number(number, _HEADER) + 1


def _number(text: str, param: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        form = "a number from 0 on" if param == "from" else "an event's id, such as cmpl-abc:17"
        raise RequestError(f"{param}={show(text)} is not allowed; it is {form}.", param)
    return int(text)
