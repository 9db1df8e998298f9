"""Input file of a batch: its lines, and the checks before the first one runs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from octavo.server.batch_line import BatchLine, LineError, parse_line
from octavo.server.errors import show

MAX_LINES = 50_000
"""Most requests of a batch, as OpenAI limits them."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 100
# Bytes of a line besides its body.
_LINE_BYTES = 2**16
_PIECE = 2**20


class BatchError(msgspec.Struct, frozen=True):
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class CheckedInput(msgspec.Struct, frozen=True):
    """Result of `check_input`."""

    errors: list[BatchError]
    num_lines: int
    model: str | None
    """Model that the first line names."""


class _Body(msgspec.Struct):
    """Fields of a request that are checked before the batch starts."""

    model: str | None = None


def read_lines(path: Path, max_request_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with their numbers from 1; None: a line is too long.

    Args:
        path: the file.
        max_request_bytes: most bytes of a request.

    Raises:
        OSError: the file cannot be read.
    """
    limit = max_request_bytes + _LINE_BYTES
    number = 0
    with open(path, "rb") as stream:
        while line := stream.readline(limit):
            number += 1
            if len(line) == limit and not line.endswith(b"\n"):
                yield number, None
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_PIECE)
            elif line.strip():
                yield number, line


def check_input(
    path: Path, endpoint: str, models: Collection[str] | None, max_request_bytes: int
) -> CheckedInput:
    """Check the lines of a file; stop at the hundredth error.

    Args:
        path: the file.
        endpoint: address that all lines must name.
        models: names of the model and its adapters; None: resolvers may know others.
        max_request_bytes: most bytes of a request.

    Raises:
        OSError: the file cannot be read.
    """
    errors: list[BatchError] = []
    seen: set[bytes] = set()
    count, model = 0, None
    for number, line in read_lines(path, max_request_bytes):
        count += 1
        if count > MAX_LINES:
            errors.append(
                BatchError("too_many_lines", f"The file has more than {MAX_LINES} lines; split it.")
            )
            break
        try:
            named = _check(line, endpoint, models, seen, max_request_bytes)
            model = model or named
        except LineError as error:
            message = f"Line {number} {error.message}"
            errors.append(BatchError(error.code, message, number, error.param))
            if len(errors) == _MAX_ERRORS:
                break
    if not count:
        errors.append(BatchError("empty_file", "The file has no lines; write a request on each."))
    return CheckedInput(errors, count, model)


def _check(
    line: bytes | None,
    endpoint: str,
    models: Collection[str] | None,
    seen: set[bytes],
    max_request_bytes: int,
) -> str | None:
    """Check a line; return the model that it names.

    Raises:
        LineError: the line is wrong.
    """
    if line is None:
        raise LineError(
            f"is longer than a request of {max_request_bytes} bytes (--max-request-bytes).",
            "line_too_long",
        )
    request = parse_line(line)
    if request.url != endpoint:
        raise LineError(
            f"has url={request.url!r}; the batch is for {endpoint}.", "invalid_url", "url"
        )
    if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            f"has a custom_id of {len(request.custom_id)} characters; give 1 to {MAX_CUSTOM_ID}.",
            "invalid_custom_id",
            "custom_id",
        )
    digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        raise LineError(
            f"has the custom_id {show(request.custom_id)} of an earlier line; give each its own.",
            "duplicate_custom_id",
            "custom_id",
        )
    seen.add(digest)
    return _check_model(request, models)


def _check_model(request: BatchLine, models: Collection[str] | None) -> str | None:
    try:
        model = msgspec.json.decode(request.body, type=_Body).model
    except (msgspec.MsgspecError, RecursionError):
        raise LineError(
            "has a body that is no object with a model's name; give the JSON of a request.",
            "invalid_body",
            "body",
        ) from None
    if model is not None and models is not None and model not in models:
        raise LineError(
            f"names the model {show(model)}; this server has {', '.join(models)}.",
            "model_not_found",
            "body.model",
        )
    return model
