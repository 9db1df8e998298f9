"""Fields of the forms of /v1/audio, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from octavo.compat.request_fields import Unsupported
from octavo.errors import RequestError, UnsupportedError
from octavo.server.body import Body, shown_name, validate
from octavo.server.errors import show
from octavo.server.schema import Int, Milliseconds, RequestId
from octavo.speech.formats import ResponseFormat

_BOOLS = {"true": True, "false": False, "1": True, "0": False}


class AudioBody(Body):
    """Fields of a transcription or translation, besides `file`."""

    unsupported: ClassVar[Unsupported] = {
        "chunking_strategy": ("auto", ""),
        "include": ("",),
        "keywords": ("",),
        "known_speaker_names": ("",),
        "known_speaker_references": ("",),
        "languages": ("",),
    }

    model: str | None = None
    """Served model name; default: the first one."""
    language: Annotated[str, Field(max_length=40)] | None = None
    """Language that is spoken: a code such as de, or an English name. Default: it is detected."""
    prompt: str = ""
    """Text before the sound, which shows names and style."""
    response_format: ResponseFormat = "json"
    """Form of the answer. Default json."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Temperature of sampling. Default 0: greedy, and higher ones in turn for a part of the sound
    whose text repeats itself or is improbable."""
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    """Times in verbose_json: segment, word or both. Default segment. Times of words take more
    time."""
    stream: bool = False
    """Send the text of each part of the sound as an event."""
    seed: Int = 0
    """Seed of sampling. Default 0."""
    request_id: RequestId | None = None
    """Request id in printable ASCII; default: X-Request-Id, or generated."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds after which the request fails with 408. Also as the header X-Deadline-Ms."""
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Scope of cached prefixes: requests with another one share none."""
    explain: bool | None = None
    """Not available."""

    def check(self) -> None:
        """Raise RequestError if fields contradict each other, or are not supported."""
        if self.explain:
            raise UnsupportedError("explain=true is not supported here; leave it out.", "explain")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise RequestError(
                f"timestamp_granularities needs response_format=verbose_json, not "
                f"{self.response_format}; leave it out.",
                "timestamp_granularities",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise RequestError(
                f"stream=true is not available with response_format={self.response_format}; use "
                "json, or leave stream out.",
                "stream",
            )

    def has_times_of(self, part: Literal["segment", "word"]) -> bool:
        """Return True if the answer has the times of segments, or of words."""
        return part in (self.timestamp_granularities or ["segment"])


def read_fields(fields: Mapping[str, bytes]) -> tuple[AudioBody, list[str]]:
    """Read the fields of a form.

    Returns:
        The fields, and the names of those that are unknown, shortened and valid in a header.

    Raises:
        RequestError: a field is wrong.
    """
    values: dict[str, Any] = {}
    unknown = []
    for given, data in fields.items():
        name = given.removesuffix("[]")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise RequestError(f"{show(name)} is not valid UTF-8.", name[:64]) from None
        if name in AudioBody.unsupported:
            if text not in AudioBody.unsupported[name]:
                raise UnsupportedError(f"{name}={show(text)} is not supported; omit it.", name)
        elif name in AudioBody.model_fields:
            values[name] = _value(name, text)
        else:
            unknown.append(shown_name(name))
    body = validate(AudioBody, values)
    body.check()
    return body, unknown


def _value(name: str, text: str) -> Any:
    """Return a field's value from its text; a text that is none is left for `validate`."""
    if name == "timestamp_granularities":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name in ("stream", "explain"):
        return _BOOLS.get(text.lower(), text)
    if name in ("seed", "deadline_ms", "temperature"):
        try:
            return float(text) if name == "temperature" else int(text)
        except ValueError:
            return text
    return text
