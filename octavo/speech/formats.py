"""Forms of a transcript: OpenAI's json, text, srt, vtt and verbose_json."""

from __future__ import annotations

import html
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.speech.languages import NAMES
from octavo.speech.segments import Segment, Transcript

ResponseFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]

MEDIA_TYPES: dict[ResponseFormat, str] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/plain; charset=utf-8",
}
"""Media type of the answer in each form, as OpenAI sends it."""


def write(
    transcript: Transcript, form: ResponseFormat, *, segments: bool = True, words: bool = False
) -> str:
    """Return a transcript in a form; `segments` and `words` are those of `verbose`."""
    match form:
        case "json":
            return msgspec.json.encode(plain(transcript)).decode()
        case "verbose_json":
            return msgspec.json.encode(verbose(transcript, segments, words)).decode()
        case "text":
            return transcript.text + "\n"
        case "srt":
            return _srt(transcript.segments)
        case "vtt":
            return _vtt(transcript.segments)


def plain(transcript: Transcript) -> dict[str, Any]:
    """Return the fields of `json`; `usage` has the seconds, as OpenAI's has."""
    return {
        "text": transcript.text,
        "usage": {"type": "duration", "seconds": -int(-transcript.duration // 1)},
    }


def verbose(transcript: Transcript, segments: bool = True, words: bool = False) -> dict[str, Any]:
    """Return the fields of `verbose_json`.

    Args:
        transcript: the transcript.
        segments: True to include the segments.
        words: True to include the words, if they have times.
    """
    fields: dict[str, Any] = {
        "task": transcript.task,
        "language": NAMES.get(transcript.language, transcript.language),
        "duration": round(transcript.duration, 3),
        "text": transcript.text,
    }
    if words:
        fields["words"] = [msgspec.to_builtins(word) for word in transcript.words]
    if segments:
        parts = [msgspec.to_builtins(segment) for segment in transcript.segments]
        fields["segments"] = [{k: v for k, v in it.items() if k != "words"} for it in parts]
    return {**fields, "usage": plain(transcript)["usage"]}


def _srt(segments: list[Segment]) -> str:
    """Return SubRip's subtitles."""
    return "".join(
        f"{number}\n{_time(s.start, ',')} --> {_time(s.end, ',')}\n{_cue(s.text)}\n\n"
        for number, s in enumerate(segments, 1)
    )


def _vtt(segments: list[Segment]) -> str:
    """Return WebVTT's subtitles."""
    # The text of a cue may have tags, so that < and & are written as in HTML.
    return "WEBVTT\n\n" + "".join(
        f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{html.escape(_cue(s.text), False)}\n\n"
        for s in segments
    )


def _cue(text: str) -> str:
    """Return the text of a cue: lines without an arrow, none of them empty."""
    lines = (line.strip() for line in text.replace("-->", "->").splitlines())
    return "\n".join(line for line in lines if line)


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
