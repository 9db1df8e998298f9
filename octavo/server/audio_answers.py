"""Answers of the routes of speech: transcriptions and translations."""

from __future__ import annotations

from typing import Literal, NotRequired

from octavo.server.answers import Answer


class DurationUsage(Answer):
    """Seconds of a sound, rounded up."""

    type: Literal["duration"]
    seconds: int


class Transcription(Answer):
    """POST /v1/audio/transcriptions with response_format=json."""

    text: str
    usage: DurationUsage


class TranscriptionSegment(Answer):
    """Part of a transcription; probabilities are those of its window."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(Answer):
    """Word of a transcript."""

    word: str
    start: float
    end: float


class VerboseTranscription(Answer):
    """POST /v1/audio/transcriptions with response_format=verbose_json.

    `timestamp_granularities` chooses words, segments or both.
    """

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    words: NotRequired[list[TranscriptionWord]]
    segments: NotRequired[list[TranscriptionSegment]]
    usage: DurationUsage


class TranscriptionDelta(Answer):
    """Text of a part of a sound."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptionDone(Answer):
    """Whole text of a sound."""

    type: Literal["transcript.text.done"]
    text: str
    usage: DurationUsage
