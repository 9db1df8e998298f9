"""Streams of APIs that no other server continues: their complete events, and their errors."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import msgspec

from octavo.server.errors import (
    anthropic_error_event,
    error_detail,
    error_event,
    ollama_error_json,
)

MEDIA_TYPES = {
    "text/event-stream": re.compile(rb"\r?\n\r?\n"),
    "application/x-ndjson": re.compile(rb"\n"),
}
"""Ends of the parts of a stream, by media type."""
_LONGEST_END = 4


async def complete_parts(
    chunks: AsyncIterator[bytes], end: re.Pattern[bytes], limit: int
) -> AsyncIterator[list[bytes]]:
    """Yield the complete parts of a stream, each with its end, all available ones at a time.

    What follows the last end counts as a part when the stream ends.

    Args:
        chunks: the stream as it arrives.
        end: end of a part.
        limit: maximum bytes of a part.

    Raises:
        ValueError: a part is longer.
    """
    rest, searched = b"", 0
    async for chunk in chunks:
        rest += chunk
        parts, begin = [], 0
        while (found := end.search(rest, max(begin, searched))) is not None:
            parts.append(rest[begin : found.end()])
            begin = found.end()
        rest = rest[begin:]
        searched = max(0, len(rest) - _LONGEST_END)
        if len(rest) > limit:
            raise ValueError(f"a part of the stream has more than {limit} bytes")
        if parts:
            yield parts
    if rest:
        yield [rest]


def data_of(event: bytes) -> bytes:
    """Return the data of a server-sent event."""
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))


def failure_writer(path: str) -> Callable[[BaseException, int], bytes] | None:
    """Return the function that writes the last event of a stream that failed.

    Its arguments are the error and the number that follows the last event's.

    Args:
        path: path of the request, with the query.
    """
    if path.startswith("/v1/messages"):
        return lambda error, number: anthropic_error_event(error)
    if path.startswith("/v1/responses"):
        return _response_error
    if path.startswith("/api/"):
        return lambda error, number: ollama_error_json(error) + b"\n"
    return None


def openai_failure(error: BaseException) -> bytes:
    """Return the last events of a stream of completions that failed."""
    return error_event(error) + b"data: [DONE]\n\n"


def _response_error(error: BaseException, number: int) -> bytes:
    event = {**error_detail(error), "type": "error", "sequence_number": number}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def next_number(event: bytes) -> int | None:
    """Return the number that follows an event of the Responses API; None if it has none."""
    try:
        number = msgspec.json.decode(data_of(event))["sequence_number"]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        return None
    return number + 1 if isinstance(number, int) else None
