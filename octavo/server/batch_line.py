"""A line of a batch: a request in OpenAI's batch format, answered as the server would answer it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from octavo.errors import EngineDeadError, QueueFullError, RequestError
from octavo.server import answers
from octavo.server.body import Body, check_body
from octavo.server.chat import ChatCompletion
from octavo.server.completions import Completion
from octavo.server.embeddings import Embeddings
from octavo.server.errors import (
    BodyTooLargeError,
    UnavailableError,
    error_detail,
    error_status,
    log_unexpected,
    show,
)
from octavo.server.middleware import RequestContext
from octavo.server.pooling_schema import EmbeddingsBody
from octavo.server.response_files import StoredFiles
from octavo.server.responses import respond_in_batch
from octavo.server.responses_schema import ResponseBody
from octavo.server.schema import ChatBody, CompletionBody
from octavo.server.state import ServerState
from octavo.system.logs import REQUEST_ID
from octavo.system.offload import offload

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
"""Routes that a line may name."""

MAX_ANSWER_BYTES = 64 * 2**20
"""Most bytes of an answer, which is in memory as a whole: logprobs as JSON need much."""
# Only one line at a time writes an answer with more bytes.
_SMALL = 2**20

_ROUTES: dict[Endpoint, tuple[type[Body], Callable[[Request, Any], Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatBody, ChatCompletion.respond),
    "/v1/completions": (CompletionBody, Completion.respond),
    "/v1/responses": (ResponseBody, respond_in_batch),
    "/v1/embeddings": (EmbeddingsBody, Embeddings.serve),
}


class BatchLine(msgspec.Struct, frozen=True):
    """Line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: Endpoint
    body: msgspec.Raw
    """Request, as JSON."""


class LineAnswer(msgspec.Struct, frozen=True):
    """Answer to a line."""

    status: int
    """HTTP status that the server would have sent."""
    request_id: str
    body: bytes
    """JSON of the answer, or of OpenAI's error object in `error`."""
    error: answers.ErrorDetail | None
    """Error; None: the answer is good."""


class LineError(Exception):
    """Line that is no request.

    Args:
        message: what is wrong, such as "has no url".
        code: OpenAI-style machine-readable code.
        param: field of the line that is wrong, if any.
        custom_id: id of the line, if it can be read.
    """

    def __init__(
        self, message: str, code: str, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.custom_id = custom_id


def parse_line(line: bytes) -> BatchLine:
    """Parse a line; its body is not checked.

    Raises:
        LineError: it is no request.
    """
    try:
        return msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _fault(error, line) from None


async def answer_line(
    state: ServerState,
    line: BatchLine,
    context: RequestContext,
    batches: StoredFiles | None = None,
) -> LineAnswer:
    """Answer a line; a wrong one gets an error as its answer.

    Args:
        state: the server.
        line: the line.
        context: id, key and rank of its request.
        batches: batches of the server, which have its files; None: there are no files.

    Raises:
        QueueFullError: the server has no room now; try again later.
        EngineDeadError, UnavailableError: the server stops.
    """
    REQUEST_ID.set(context.request_id)
    model, respond = _ROUTES[line.url]
    data = bytes(line.body)
    sent = bytearray()
    status = 200
    ended: int | None = None
    writing = AsyncExitStack()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        piece = message.get("body", b"")
        if len(sent) + len(piece) > MAX_ANSWER_BYTES:
            raise RequestError(
                f"The answer has more than {MAX_ANSWER_BYTES} bytes, the most of a line; ask for "
                "fewer logprobs or answers.",
                None,
                "answer_too_long",
            )
        if len(sent) <= _SMALL < len(sent) + len(piece):
            await writing.enter_async_context(state.long_line)
        sent.extend(piece)

    app = SimpleNamespace(state=SimpleNamespace(octavo=state, batches=batches))
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": line.url,
        "query_string": b"",
        "headers": [],
        "app": app,
        "octavo": context,
    }
    context.body_bytes = len(data)
    try:
        if len(data) > state.max_chat_bytes:
            raise BodyTooLargeError(state.max_chat_bytes)
        body, _ = await offload(len(data) // 8, check_body, data, model, state.config.strict_fields)
        if getattr(body, "stream", False):
            raise RequestError("stream must be false in a batch.", "stream")
        request = Request(scope, _never)
        response = await respond(request, body)
        async with writing:
            await response(scope, _never, send)
        ended = status
    except (QueueFullError, EngineDeadError, UnavailableError):
        if context.story is not None:  # there will be another one
            state.stories.remove(context.story)
        raise
    except Exception as error:
        log_unexpected(error)
        ended = error_status(error)
        return failed(context.request_id, error)
    finally:
        state.body_bytes -= context.body_bytes - len(data)  # files that the line names
        if context.story is not None:
            context.story.end_http(ended, time.monotonic())
    return LineAnswer(status, context.request_id, bytes(sent), None)


def failed(request_id: str, error: Exception) -> LineAnswer:
    """Return the answer to a line that failed."""
    detail = error_detail(error)
    written = msgspec.json.encode(answers.ErrorAnswer(error=detail))
    return LineAnswer(error_status(error), request_id, written, detail)


async def _never() -> Message:
    """Wait for a message of the client, which never disconnects."""
    forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await forever


def _fault(error: Exception, line: bytes) -> LineError:
    """Return the error of a line that is no `BatchLine`."""
    custom_id = _custom_id(line)
    example = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}'
    if not isinstance(error, msgspec.ValidationError):
        place = re.search(r"\((byte \d+)\)", str(error))
        where = f" (at {place[1]})" if place else ""
        try:
            line.decode()
        except UnicodeDecodeError as wrong:
            where = f" (not UTF-8 at byte {wrong.start})"
        said = f"is not valid JSON{where}; write each request on one line, as {example}."
        return LineError(said, "invalid_json_line", None, custom_id)
    if missing := re.search(r"missing required field `(\w+)`", str(error)):
        said, param = f"has no {missing[1]}; write {example}.", missing[1]
        return LineError(said, "missing_required_parameter", param, custom_id)
    if enum := re.search(r"Invalid enum value '(.*)' - at `\$\.(\w+)`", str(error)):
        allowed = get_args(get_type_hints(BatchLine)[enum[2]])
        said = f"has {enum[2]}={show(enum[1])}; use {' or '.join(allowed)}."
        return LineError(said, f"invalid_{enum[2]}", enum[2], custom_id)
    if kind := re.search(r"got `(\w+)` - at `\$\.(\w+)`", str(error)):
        said = f"has a {kind[2]} that is of JSON's type {kind[1]}; give a text."
        return LineError(said, "invalid_type", kind[2], custom_id)
    return LineError(f"is not a JSON object; write {example}.", "invalid_json_line")


def _custom_id(line: bytes) -> str | None:
    """Return the id of a wrong line, if it can be read."""

    class Named(msgspec.Struct):
        custom_id: str

    try:
        return msgspec.json.decode(line, type=Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
