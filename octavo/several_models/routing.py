"""Choice of a request's model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.router.job import POOLING, SOUNDS, Job
from octavo.router.stored_objects import unknown_object
from octavo.server.body import parse_json
from octavo.server.errors import show
from octavo.server.ollama_schema import LATEST
from octavo.several_models.state import ModelsState, OneModel

_CLASSIFYING = frozenset(
    path for path in POOLING if re.search(r"/(classify|predict|score|rerank)$", path)
)
_MOST_MILLISECONDS = 2**53
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:h|ms|m|s|us|µs|ns)")


class Asked(msgspec.Struct, frozen=True):
    """Fields of a body that the front reads; the model's server checks the others."""

    model: Any = None
    name: Any = None
    """Older name of `model` in POST /api/show."""
    deadline_ms: Any = None
    max_ttft_ms: Any = None
    keep_alive: Any = None
    """Ollama's: time for which an idle model stays loaded."""


def read_asked(body: bytes) -> Asked:
    """Read the fields of a body that choose a model.

    Raises:
        RequestError: the body is not a JSON object.
    """
    if not body:
        return Asked()
    try:
        return msgspec.json.decode(body, type=Asked)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        parse_json(body)  # raises the error with its reason
        raise RequestError("The body must be a JSON object.", None, "invalid_json") from None


def asked_of_form(model: str | None, fields: Mapping[str, bytes]) -> Asked:
    """Return what a form asks for.

    Args:
        model: model that it names.
        fields: its fields; the model's server rejects a wrong one.
    """
    deadline = fields.get("deadline_ms", b"")
    # Longer numbers are beyond the limit.
    given = int(deadline) if deadline.isdigit() and len(deadline) < 17 else None
    return Asked(model=model, deadline_ms=given)


def limit(arrival: float, given: object, header: int | None) -> float | None:
    """Return the end of a limit of a request's time in seconds of `time.monotonic`; None: none.

    Args:
        arrival: arrival in seconds of `time.monotonic`.
        given: milliseconds in the body; the model's server rejects a wrong value.
        header: milliseconds in the header.
    """
    milliseconds: float | None = header
    if isinstance(given, int | float) and not isinstance(given, bool):
        milliseconds = given if 0 < given <= _MOST_MILLISECONDS else header
    return None if milliseconds is None else arrival + milliseconds / 1000


async def choose_model(
    state: ModelsState, job: Job, asked: Asked, resolve: Callable[[str], Awaitable[OneModel]]
) -> OneModel:
    """Return the model of a request.

    It is the one that the request names; otherwise the one whose server stores what the request
    names; otherwise the first one that has what the route needs.

    Args:
        state: the server.
        job: the request.
        asked: fields of its body.
        resolve: looks for the model of an unknown name; see `ModelsState.find_or_resolve`.

    Raises:
        NotFoundError: there is no such model, or no such object.
        RequestError: the field `model` is not text.
        UnavailableError: the models have not been read in time.
    """
    path = job.path.partition("?")[0]
    name = asked.model
    if name is None and path == "/api/show":
        name = asked.name
    if name is not None and name != "":
        if not isinstance(name, str):
            raise RequestError(f"model={show(name)} is not allowed; give a name.", "model")
        model = state.look_up(name)
        if model is None and path.startswith("/api/"):  # resolvers are not asked
            return state.find(name.removesuffix(LATEST))
        return model or await resolve(name)
    if job.objects:
        if (owner := state.owner_of(job)) is not None:
            return owner
        if not job.fields:
            raise unknown_object(job.objects[0][0], in_path=True)
    if path in _CLASSIFYING:
        return await state.default(["classify", "embed"])
    if path in SOUNDS:
        return await state.default(["transcribe"])
    if path in POOLING or path == "/info":
        return await state.default(["embed", "classify"])
    return await state.default(["generate"])


def read_keep_alive(value: object) -> float | None:
    """Return Ollama's `keep_alive` in seconds; None: the model stays.

    Args:
        value: seconds, or text such as "5m"; a negative number means that the model stays.

    Raises:
        RequestError: it is neither.
    """
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of a huge integer
            seconds = float(value)
    elif isinstance(value, str):
        seconds = _read_duration(value.strip())
    if seconds is None or not seconds < float("inf"):
        raise RequestError(
            f'keep_alive={show(value)} is not allowed; give seconds, or text such as "5m".',
            "keep_alive",
        )
    return None if seconds < 0 else seconds


def _read_duration(text: str) -> float | None:
    """Return the seconds of a duration as Go writes it ("1h30m"), or of a number."""
    if re.fullmatch(r"[-+]?\d{1,15}(\.\d*)?", text):
        return float(text)
    sign = -1 if text.startswith("-") else 1
    rest, seconds = text.lstrip("+-"), 0.0
    if not re.fullmatch(rf"(?:{_DURATION.pattern})+", rest):
        return None
    for part in _DURATION.findall(rest):
        number = re.match(r"[\d.]+", part)
        assert number is not None
        seconds += float(number[0]) * _UNITS[part[number.end() :]]
    return sign * seconds


def check_background(state: ModelsState, job: Job) -> None:
    """Reject work without a client if its model may be unloaded meanwhile.

    Raises:
        RequestError: it is such work.
    """
    if job.fields.get("background") and state.set.most_loaded < len(state.models):
        raise RequestError(
            "background=true is not supported here, since the model may be unloaded before the "
            "answer is complete (--max-loaded-models); leave it out.",
            "background",
        )
