"""Parsing and checks of request bodies; every error in a body is a 4xx."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from octavo.compat.request_fields import INSTEAD, NO_EFFECT, Unsupported
from octavo.errors import DeadlineError, RequestError, UnsupportedError
from octavo.sampling_params import is_deeper
from octavo.server.errors import (
    BodyTooLargeError,
    ClientDisconnectError,
    MediaTypeError,
    show,
)
from octavo.server.http_state import http_state_of
from octavo.server.middleware import context_of
from octavo.server.state import state_of
from octavo.system.offload import offload

MAX_JSON_DEPTH = 64
# Numbers, strings and so on, all together: one call parses them, and nothing can interrupt it.
MAX_JSON_VALUES = 2**19
# Objects, lists and keys; each costs the time of several numbers.
MAX_JSON_CONTAINERS = 100_000
_PIECE = 2**18
# Seconds in which a body must have arrived: a slow client holds a place.
BODY_TIMEOUT = 60.0
MAX_UNKNOWN_FIELDS = 20
_MAX_SHOWN_NAME = 48

M = TypeVar("M", bound="Body")
_compiling = threading.Lock()


class Body(BaseModel):
    """Base of the request bodies and of the objects in them."""

    # Compiling all bodies takes a tenth of a second: `validate` compiles each when it is needed.
    model_config = ConfigDict(strict=True, defer_build=True)

    unsupported: ClassVar[Unsupported] = {}
    """Unsupported fields that other servers know, and the values of each that are allowed."""
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    """Replacements for them."""
    inner: ClassVar[Mapping[str, type[Body]]] = {}
    """Classes of the fields that hold an object or a list of objects."""


def check_media_type(request: Request) -> None:
    """Reject a POST without the content type of JSON.

    A web page may send other types, or none, to any address without asking its server first.

    Raises:
        MediaTypeError: the type is another one or missing.
    """
    given = request.headers.get("content-type")
    if (given or "").partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError(
            f"Content-Type is {'missing' if given is None else show(given)}; send JSON with "
            "`Content-Type: application/json`."
        )


async def read_body(request: Request, limit: int) -> bytes:
    """Read a request's body; reject it as soon as its size is known to be too large.

    Raises:
        BodyTooLargeError: the body has more than `limit` bytes, announced or sent.
        MediaTypeError: the body is not JSON by its headers, or compressed.
        ClientDisconnectError: the client disconnected.
        DeadlineError: the body did not arrive in time.
        QueueFullError: the body is large, and the bodies in flight exceed their limit.
    """
    check_media_type(request)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(
            f"Content-Encoding {show(encoding)} is not supported; send the body uncompressed."
        )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLargeError(limit)
    state, context = http_state_of(request), context_of(request)
    data = bytearray()
    deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            raise DeadlineError(
                f"The body did not arrive within {BODY_TIMEOUT:.0f} s; send it faster."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectError
        chunk = message.get("body", b"")
        data += chunk
        context.body_bytes += len(chunk)
        state.body_bytes += len(chunk)
        if len(data) > limit:
            raise BodyTooLargeError(limit)
        state.check_bodies(len(data))
        if not message.get("more_body", False):
            context.received = time.monotonic()
            return bytes(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no NaN or Infinity, limited depth and number of values.

    Raises:
        RequestError: the body is invalid; the message has the reason and the place.
    """
    if not data.strip():
        raise RequestError("The body is empty; send a JSON object.", None, "invalid_json")
    _check_num_values(data)
    try:
        value = msgspec.json.decode(data)
        deep = is_deeper(value, MAX_JSON_DEPTH)
    except RecursionError:
        deep = True
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = str(error).split(" - at `")[0].removeprefix("JSON is malformed: ")
        said = f"The body is not valid JSON: {reason}."
        try:
            data.decode()
        except UnicodeDecodeError as wrong:
            said = f"The body is not valid UTF-8 (byte {wrong.start})."
        raise RequestError(said, None, "invalid_json") from None
    if deep:
        raise RequestError(
            f"The JSON is nested more than {MAX_JSON_DEPTH} levels deep.", None, "invalid_json"
        )
    if not isinstance(value, dict):
        raise RequestError(
            f"The body must be a JSON object, not {_json_type(value)}.", None, "invalid_json"
        )
    return value


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Check a parsed body against its model.

    Raises:
        RequestError: a field is wrong; the message has the field, the value and the reason.
    """
    if not model.__pydantic_complete__:
        with _compiling:  # bodies are checked on several threads
            model.model_rebuild()
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _request_error(error, body) from None


def unknown_fields(model: type[Body], body: dict[str, Any]) -> list[str]:
    """Return the unknown fields of a body, such as `messages[].mood`.

    Returns:
        Up to `MAX_UNKNOWN_FIELDS` different fields, shortened and valid in a header.

    Raises:
        UnsupportedError: a field is known, but not supported yet.
    """
    found: dict[str, None] = {}
    _look_for_unknown(model, body, "", found)
    return [shown_name(name) for name in found]


def shown_name(name: str) -> str:
    """Return a client's name of a field, shortened and valid in a header."""
    return re.sub(r"[^!-+\--~]", "?", name[:_MAX_SHOWN_NAME])


@cache
def _names(model: type[Body]) -> frozenset[str]:
    """Return a model's fields by their names in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _look_for_unknown(
    model: type[Body], body: dict[str, Any], where: str, found: dict[str, None]
) -> None:
    for name, value in body.items():
        if name in _names(model):
            inner = model.inner.get(name)
            if inner is None:
                continue
            if isinstance(value, dict):
                _look_for_unknown(inner, value, f"{where}{name}.", found)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, dict):
                        _look_for_unknown(inner, item, f"{where}{name}[].", found)
        elif name in model.unsupported:
            if value not in model.unsupported[name]:
                other = model.instead.get(name)
                instead = f"leave {name} out" if other is None else f"use {other}"
                raise UnsupportedError(
                    f"{where}{name}={show(value)} is not supported yet; {instead}.", where + name
                )
        elif name not in NO_EFFECT and len(found) < MAX_UNKNOWN_FIELDS:
            found[where + name] = None


async def read_model(
    request: Request, model: type[M] | Callable[[dict[str, Any]], type[M]], limit: int
) -> M:
    """Read, parse and check a request's body.

    Args:
        request: the request.
        model: the class of the body, or a function that selects it by the parsed body.
        limit: maximum number of bytes.

    Raises:
        RequestError: the body is wrong; with --strict-fields also for an unknown field.
    """
    data = await read_body(request, limit)
    strict = state_of(request).config.strict_fields

    def check() -> tuple[M, list[str]]:
        return check_body(data, model, strict)

    checked, unknown = await offload(len(data) // 8, check)
    context_of(request).ignored_fields = unknown
    return checked


def check_body(
    data: bytes, model: type[M] | Callable[[dict[str, Any]], type[M]], strict: bool
) -> tuple[M, list[str]]:
    """Parse and check a body.

    Args:
        data: JSON.
        model: the class of the body, or a function that selects it by the parsed body.
        strict: reject unknown fields.

    Returns:
        The body, and its unknown fields.

    Raises:
        RequestError: the body is wrong.
    """
    body = parse_json(data)
    kind = model if isinstance(model, type) else model(body)
    unknown = unknown_fields(kind, body)
    checked: M = validate(kind, body)
    if unknown and strict:
        raise RequestError(
            f"Unknown fields: {', '.join(unknown)}; leave them out (this server runs with "
            "--strict-fields).",
            unknown[0],
            "unknown_parameter",
        )
    return checked, unknown


def _request_error(error: ValidationError, body: dict[str, Any]) -> RequestError:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    param = _path(first["loc"], body, first["type"] == "missing")
    if first["type"] == "missing":
        return RequestError(f"{param} is missing; it is required.", param, "missing_parameter")
    reason = first["msg"][0].lower() + first["msg"][1:]
    return RequestError(f"{param}={show(first['input'])} is not allowed: {reason}.", param)


def _path(loc: tuple[int | str, ...], body: object, missing: bool) -> str:
    """Return a field's path such as `messages[0].content`, without pydantic's names of unions."""
    path = ""
    here = body
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif isinstance(here, dict) and (part in here or (missing and i == len(loc) - 1)):
            path, here = f"{path}.{part}" if path else str(part), here.get(part)
    return path


def _check_num_values(data: bytes) -> None:
    """Reject bodies with too many values, before they are parsed."""
    if len(data) <= MAX_JSON_CONTAINERS:
        return  # each value has at least one character
    values, containers, quotes, begin = 1, 0, 0, 0
    while begin < len(data):
        # A piece at a time: numpy keeps the interpreter's lock.
        piece = data[begin : begin + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # keep an escaped character whole
            piece = data[begin : begin + _PIECE + 1]
        # In a run of backslashes, each pair is one character.
        bare = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        characters = np.frombuffer(bare, np.uint8)
        marks = characters == ord('"')
        # Marks inside of strings do not count: the number of quotes before them is odd.
        inside = (np.cumsum(marks, dtype=np.uint8) + quotes) & 1
        quotes += int(np.count_nonzero(marks))
        quotes &= 1
        commas, *others = (
            int(np.count_nonzero((characters == ord(mark)) & (inside == 0))) for mark in ",[{:"
        )
        values, containers = values + commas, containers + sum(others)
        begin += len(piece)
        for found, limit, what in (
            (values, MAX_JSON_VALUES, "values"),
            (containers, MAX_JSON_CONTAINERS, "objects, lists and keys"),
        ):
            if found > limit:
                raise RequestError(
                    f"The body holds more than {limit} {what}, the most this server accepts in a "
                    "request. Split it.",
                    None,
                    "too_many_values",
                )


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
