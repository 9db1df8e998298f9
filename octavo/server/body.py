"""From the bytes of a request to a checked object; everything wrong with them is a 4xx."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from octavo.errors import DeadlineError, RequestError, UnsupportedError
from octavo.offload import offload
from octavo.server.errors import (
    BodyTooLargeError,
    ClientDisconnectError,
    MediaTypeError,
    show,
)

MAX_JSON_DEPTH = 64
# Numbers, strings and so on, all together: parsing them is one call, which nothing can interrupt.
MAX_JSON_VALUES = 2**19
# Objects, lists and keys, of which each costs as much as several numbers.
MAX_JSON_CONTAINERS = 100_000
# Seconds in which a body must have arrived: a client that sends a byte now and then holds a place.
BODY_TIMEOUT = 60.0

M = TypeVar("M", bound="Body")


class Body(BaseModel):
    """Base of the request bodies.

    `unsupported` names fields that OpenAI or vLLM know and this version does not have, each with
    the values that ask for nothing. Other unknown fields are ignored, as vLLM does.
    """

    model_config = ConfigDict(strict=True)

    @classmethod
    def unsupported(cls) -> dict[str, tuple[object, ...]]:
        """Known fields that are refused, and the values of each that are let through."""
        return {}


async def read_body(request: Request, limit: int) -> bytes:
    """Reads a request's body; refuses it as soon as it is known to be too large.

    Raises:
        BodyTooLargeError: it has more than `limit` bytes, announced or sent.
        MediaTypeError: it is not JSON by its headers.
        ClientDisconnectError: the client went away.
        DeadlineError: it did not arrive in time.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(
            f"Content-Type is {show(content_type)}; send JSON with "
            "`Content-Type: application/json`."
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(
            f"Content-Encoding {show(encoding)} is not supported; send the body uncompressed."
        )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLargeError(limit)
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
        data += message.get("body", b"")
        if len(data) > limit:
            raise BodyTooLargeError(limit)
        if not message.get("more_body", False):
            return bytes(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parses a JSON object strictly: UTF-8, no NaN or Infinity, limited depth and number of values.

    Raises:
        RequestError: saying what is wrong and where.
    """
    if not data.strip():
        raise RequestError("The body is empty; send a JSON object.", None, "invalid_json")
    _check_num_values(data)
    try:
        value = msgspec.json.decode(data)
        deep = _deeper_than(value, MAX_JSON_DEPTH)
    except RecursionError:
        deep = True
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8.", None, "invalid_json") from None
    except msgspec.MsgspecError as error:
        reason = str(error).split(" - at `")[0].removeprefix("JSON is malformed: ")
        raise RequestError(f"The body is not valid JSON: {reason}.", None, "invalid_json") from None
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
    """Checks a parsed body against its model.

    Raises:
        RequestError: naming the field, the value and what is allowed.
        UnsupportedError: the field is known, but not supported yet.
    """
    for name, harmless in model.unsupported().items():
        if name in body and body[name] not in harmless:
            raise UnsupportedError(
                f"{name}={show(body[name])} is not supported yet; leave {name} out.", name
            )
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _request_error(error, body) from None


async def read_model(request: Request, model: type[M], limit: int) -> M:
    """Reads, parses and checks a request's body."""
    data = await read_body(request, limit)

    def parse() -> M:
        return validate(model, parse_json(data))

    return await offload(len(data) // 8, parse)


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
    """A field's path such as `messages[0].content`, without pydantic's names of union members."""
    path = ""
    here = body
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif isinstance(here, dict) and (part in here or (missing and i == len(loc) - 1)):
            path, here = f"{path}.{part}" if path else str(part), here.get(part)
    return path


def _deeper_than(value: object, limit: int) -> bool:
    """Whether lists and dicts are nested more than `limit` levels; looks level by level."""
    level = [value]
    for _ in range(limit + 1):
        inner: list[object] = []
        for item in level:
            children = item.values() if type(item) is dict else item if type(item) is list else ()
            inner += [child for child in children if type(child) is dict or type(child) is list]
        if not inner:
            return False
        level = inner
    return True


def _check_num_values(data: bytes) -> None:
    """Refuses bodies of more values than are wanted, before they are parsed."""
    if len(data) <= MAX_JSON_CONTAINERS:
        return  # each has a character at least
    values, containers = _count_marks(np.frombuffer(data, np.uint8))
    if values > MAX_JSON_VALUES or containers > MAX_JSON_CONTAINERS:
        # Marks inside of strings do not count. Of a run of backslashes, pairs are one character.
        bare = data.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        characters = np.frombuffer(bare, np.uint8)
        # The number of quotes before a character, of which only the last bit counts.
        quoted = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1
        values, containers = _count_marks(np.where(quoted, 0, characters))
    for found, limit, what in (
        (values, MAX_JSON_VALUES, "values"),
        (containers, MAX_JSON_CONTAINERS, "objects, lists and keys"),
    ):
        if found > limit:
            raise RequestError(
                f"The body holds {found} {what}; this server takes at most {limit} in a request. "
                "Split it.",
                None,
                "too_many_values",
            )


def _count_marks(characters: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Numbers of values and of containers and keys, from the marks between them."""
    commas, *others = (int(np.count_nonzero(characters == ord(mark))) for mark in ",[{:")
    return commas + 1, sum(others)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
