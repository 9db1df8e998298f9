"""Settings of a session of /v1/realtime, as in OpenAI's Realtime API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from octavo.errors import RequestError
from octavo.speech.turns import TurnDetection

RATE = 24_000
"""Samples a second of a client's sound."""
_MOST_MS = 10_000


class _Struct(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Format(_Struct):
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] = 24000


class _Transcription(_Struct):
    # Lengths as in the forms of /v1/audio.
    model: str | None = None
    language: Annotated[str, msgspec.Meta(max_length=40)] | None = None
    prompt: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class _ServerVad(_Struct):
    type: Literal["server_vad"] = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


class _Input(_Struct):
    format: _Format = msgspec.field(default_factory=_Format)
    transcription: _Transcription = msgspec.field(default_factory=_Transcription)
    turn_detection: _ServerVad | None = msgspec.field(default_factory=_ServerVad)
    noise_reduction: None = None


class _Audio(_Struct):
    input: _Input = msgspec.field(default_factory=_Input)


class SessionSettings(_Struct):
    """Settings of a session; they begin with these."""

    type: Literal["transcription"] = "transcription"
    audio: _Audio = msgspec.field(default_factory=_Audio)
    include: list[str] | None = None

    @property
    def turns(self) -> TurnDetection | None:
        """Detection of turns; None: the client commits them."""
        given = self.audio.input.turn_detection
        if given is None:
            return None
        return TurnDetection(given.threshold, given.prefix_padding_ms, given.silence_duration_ms)

    def updated(self, given: object) -> SessionSettings:
        """Return the settings after `session.update`; fields that it lacks stay.

        Raises:
            RequestError: a field is unknown, not supported, or has a wrong value.
        """
        if not isinstance(given, dict):
            raise RequestError("session is missing; it is an object.", "session")
        settings = _merge(msgspec.to_builtins(self), given)
        try:
            made = msgspec.convert(settings, SessionSettings)
        except msgspec.ValidationError as error:
            text = str(error).replace("`$", "`session")
            raise RequestError(
                f"This session transcribes only, and does not support this: {text}.", "session"
            ) from None
        turns = made.turns
        if turns is not None and not (
            0 <= turns.threshold <= 1
            and 0 <= turns.prefix_padding_ms <= _MOST_MS
            and 0 < turns.silence_duration_ms <= _MOST_MS
        ):
            raise RequestError(
                "session.audio.input.turn_detection needs a threshold of 0 to 1, and at most "
                f"{_MOST_MS} ms of prefix_padding_ms and silence_duration_ms.",
                "session.audio.input.turn_detection",
            )
        if made.include:
            raise RequestError(
                f"session.include={made.include[0]!r} is not supported; leave it out.",
                "session.include",
            )
        return made


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `old` with the fields of `new`, also within objects."""
    result = dict(old)
    for name, value in new.items():
        before = result.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[name] = _merge(before or {}, value) if both else value
    return result
