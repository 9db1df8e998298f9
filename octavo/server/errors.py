"""Errors in the form that OpenAI's clients expect: `{"error": {"message", "type", ...}}`."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.compat.routes import elsewhere
from octavo.errors import EngineDeadError, GivenUpError, OctavoError, RequestError
from octavo.server import answers, anthropic_answers, pooling_answers
from octavo.server.ollama_answers import OllamaError

logger = logging.getLogger(__name__)

# Long enough for every message of Octavo; short enough that a megabyte is not echoed.
MAX_MESSAGE_CHARS = 1000

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxdict = _short.maxlist = 3
_short.maxstring = _short.maxother = 60


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "invalid_api_key")


class AdminError(RequestError):
    """Request for an operator's route from a client that is not known to be the operator."""

    status = 403

    def __init__(self, path: str, *, has_key: bool) -> None:
        if has_key:
            how, code = "send an admin key, not an API key", "admin_key_required"
        else:
            how = (
                "start the server with --admin-key (or OCTAVO_ADMIN_KEY) and send that key, or "
                "with --enable-admin, which lets everyone in"
            )
            code = "admin_disabled"
        super().__init__(f"{path} is for the server's operator: {how}.", None, code)


class HostError(RequestError):
    """Host header with a name that the server does not have.

    A web page may have pointed its own name at the server's address (DNS rebinding).
    """

    status = 421

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "host_not_allowed")


class BodyTooLargeError(RequestError):
    """Request body with more bytes than the server accepts."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes, the most this server accepts "
            "(--max-request-bytes; --max-media-request-bytes for chats with pictures or sounds).",
            None,
            "request_too_large",
        )


class MediaTypeError(RequestError):
    """Body that is not JSON, or is compressed."""

    status = 415

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "unsupported_media_type")


class ProtocolError(RequestError):
    """Data that is no HTTP request, or a request that is too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, None, "bad_http_request")
        self.status = status


class RouteError(RequestError):
    """Unknown address (404), or wrong method for it (405)."""

    def __init__(self, status: int, message: str, allow: str | None = None) -> None:
        super().__init__(message, None, "not_found" if status == 404 else "method_not_allowed")
        self.status = status
        self.allow = allow


class UnavailableError(RequestError):
    """Server that is about to stop; another one, or a later try, may answer."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, None, "unavailable")
        self.retry_after = retry_after


class ClientDisconnectError(OctavoError):
    """Disconnection of the client that waits for the answer."""


def show(value: object) -> str:
    """Return a value from a request, short enough for an error message."""
    return _short.repr(value)


def error_status(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, EngineDeadError) else 500


def error_writer(path: str) -> Callable[[BaseException], bytes]:
    """Return the function that writes an error in the form that clients of an address expect."""
    if "/v1/messages" in path:
        return anthropic_error_json
    if "/api/" in path and "/v1/" not in path:
        return ollama_error_json
    if re.search(_TEI_PATHS, path) and not re.search("/v[12]/", path):
        return tei_error_json
    return error_json


_TEI_PATHS = r"/(embed|embed_all|embed_sparse|predict|similarity)\b"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_event(error: BaseException) -> bytes:
    """Return the server-sent event of a stream of Anthropic's API that failed."""
    return b"event: error\ndata: " + anthropic_error_json(error) + b"\n\n"


def anthropic_error_json(error: BaseException) -> bytes:
    """Return the JSON body of an error in Anthropic's form."""
    detail, status = error_detail(error), error_status(error)
    kind = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, kind)
    found = anthropic_answers.AnthropicErrorDetail(type=kind, message=detail["message"])
    return msgspec.json.encode(anthropic_answers.AnthropicError(type="error", error=found))


def ollama_error_json(error: BaseException) -> bytes:
    """Return the JSON body of an error in the form of Ollama's API."""
    return msgspec.json.encode(OllamaError(error=error_detail(error)["message"]))


def tei_error_json(error: BaseException) -> bytes:
    """Return the JSON body of an error in the form of text-embeddings-inference."""
    status = error_status(error)
    kind = "Overloaded" if status == 429 else "Validation" if status < 500 else "Backend"
    found = pooling_answers.TEIError(error=error_detail(error)["message"], error_type=kind)
    return msgspec.json.encode(found)


def error_json(error: BaseException) -> bytes:
    """Return the JSON body of an error."""
    return msgspec.json.encode(answers.ErrorAnswer(error=error_detail(error)))


def error_detail(error: BaseException) -> answers.ErrorDetail:
    """Return OpenAI's description of an error."""
    if isinstance(error, RequestError):
        message, kind, param, code = error.message, error.type, error.param, error.code
    elif isinstance(error, OctavoError):
        message, kind, param = str(error), "server_error", None
        code = "engine_unavailable" if isinstance(error, EngineDeadError) else "internal_error"
    else:
        message = "Internal server error; the server's log says more."
        kind, param, code = "server_error", None, "internal_error"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    # A message may quote text that UTF-8 cannot express.
    message = message.encode("utf-8", "replace").decode()
    return answers.ErrorDetail(message=message, type=kind, param=param, code=code)


def error_event(error: BaseException) -> bytes:
    """Return the server-sent event of a stream that failed."""
    return b"data: " + error_json(error) + b"\n\n"


def error_response(
    error: BaseException, write: Callable[[BaseException], bytes] = error_json
) -> Response:
    """Return the answer to a request that failed before any data was sent.

    Args:
        error: the error.
        write: returns the body; see `error_writer`.
    """
    headers: dict[str, str] = {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RouteError) and error.allow:
        headers["Allow"] = error.allow
    if isinstance(error, BodyTooLargeError | UnavailableError):
        headers["Connection"] = "close"
    status = error_status(error)
    if status == 408 or isinstance(error, GivenUpError):
        headers["x-should-retry"] = "false"  # OpenAI's clients would repeat the request
    return Response(write(error), status, headers, "application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Turn errors of the router (unknown address, wrong method) into OpenAI's form."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    where, write = f"{request.method} {path}", error_writer(path)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        wrong = RouteError(405, f"{where}: method not allowed; use {allow}.", allow)
        return error_response(wrong, write)
    if error.status_code == 404:
        instead = elsewhere(path)
        said = "no such route; GET / lists them" if instead is None else f"not available; {instead}"
        return error_response(RouteError(404, f"{where}: {said}."), write)
    other = RouteError(error.status_code, f"{where}: {error.detail}")
    return error_response(other, write)


def log_unexpected(error: BaseException) -> None:
    """Log an error that no client caused; an unexpected error with its traceback."""
    if isinstance(error, OctavoError):
        if not isinstance(error, RequestError):
            logger.error("request failed: %s", error)
    else:
        logger.error("request failed", exc_info=error)
