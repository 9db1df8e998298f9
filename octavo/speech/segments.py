"""Segments of a transcript: made from tokens with timestamps, and judged."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.speech.alignment import TimedWord, Word, fit_words, median_duration
from octavo.speech.tokens import WhisperTokens

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried in turn until an answer is good enough."""
_MAX_COMPRESSION_RATIO = 2.4
_MIN_AVG_LOGPROB = -1.0
_MAX_NO_SPEECH_PROB = 0.6


@dataclass
class Segment:
    """Part of a transcript; the fields are those of OpenAI's `verbose_json`."""

    id: int
    seek: int
    """Begin of the window, in frames of 10 ms."""
    start: float
    """Seconds from the begin of the sound."""
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    """Mean logprob of the window's tokens, the end included, among those that may follow."""
    compression_ratio: float
    """Of the window's text: bytes by bytes of zlib. Repetitions have a high one."""
    no_speech_prob: float
    """Probability that the window has no speech."""
    words: list[Word] | None = None
    """Words with their times, if the request asks for them; all others have none."""


@dataclass
class Transcript:
    """Transcript of a sound."""

    task: str
    language: str
    """Code of the language, which the request has given or the model has detected."""
    duration: float
    """Seconds of the sound."""
    text: str
    segments: list[Segment] = field(default_factory=list)

    @property
    def words(self) -> list[Word]:
        """Words of all segments."""
        return [word for segment in self.segments for word in segment.words or ()]


@dataclass(frozen=True)
class Decoded:
    """Answer of the model to one window."""

    tokens: Sequence[int]
    """Without the prompt, and without the end."""
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    text: str
    """Text without special tokens."""
    words: list[TimedWord] | None = None
    """Words of the window, if the request asks for them."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text by bytes of the compressed text."""
        data = self.text.strip().encode("utf-8", "replace")
        return len(data) / len(zlib.compress(data))

    @property
    def is_silence(self) -> bool:
        """True if the window probably has no speech, and the model invented the text."""
        return self.no_speech_prob > _MAX_NO_SPEECH_PROB and self.avg_logprob < _MIN_AVG_LOGPROB

    @property
    def is_good(self) -> bool:
        """False if another temperature should be tried (arXiv 2212.04356, section 4.5)."""
        if self.is_silence:
            return True
        repeats = self.compression_ratio > _MAX_COMPRESSION_RATIO
        return not repeats and self.avg_logprob >= _MIN_AVG_LOGPROB


def make_segments(
    decoded: Decoded,
    special: WhisperTokens,
    decode: Callable[[list[int]], str],
    begin: float,
    seconds: float,
    first_id: int,
) -> list[Segment]:
    """Return the segments of a window: texts between timestamps.

    A text without timestamps is one segment, and so is one whose time does not pass. A last text
    without an end lasts until the window's end.

    Args:
        decoded: the answer for the window.
        special: the special tokens.
        decode: returns the text of tokens.
        begin: begin of the window in seconds.
        seconds: length of the window.
        first_id: id of the first segment.
    """
    segments: list[Segment] = []
    words = None if decoded.words is None else _Words(decoded.words, begin)

    def add(start: float, end: float, tokens: list[int]) -> None:
        of_text = [token for token in tokens if token < special.end]
        text = decode(of_text)
        start, end = min(start, seconds), min(end, seconds)
        own = None if words is None else words.take(len(of_text), start, end)
        if not text.strip():
            return
        segments.append(
            Segment(
                id=first_id + len(segments),
                seek=round(begin * 100),
                start=round(begin + start, 2),
                end=round(begin + max(start, end), 2),
                text=text,
                tokens=tokens,
                temperature=decoded.temperature,
                avg_logprob=decoded.avg_logprob,
                compression_ratio=decoded.compression_ratio,
                no_speech_prob=decoded.no_speech_prob,
                words=own,
            )
        )

    start, tokens = 0.0, []
    for token in decoded.tokens:
        tokens.append(token)
        time = special.seconds(token)
        if time is None:
            continue
        if len(tokens) > 1:  # the end of a text
            add(start, time, tokens)
            tokens = []
        start = time
    add(start, seconds, tokens)
    return segments


class _Words:
    """Words of a window, which its segments take in order.

    Args:
        words: the words.
        begin: begin of the window in seconds.
    """

    def __init__(self, words: Sequence[TimedWord], begin: float) -> None:
        self._words, self._begin = list(words), begin
        self._median = median_duration(words)
        self._taken = 0
        """Tokens that the words have beyond those of the segments so far."""
        self._end = 0.0
        """End of the last word so far."""

    def take(self, num_tokens: int, start: float, end: float) -> list[Word]:
        """Return the words of the next tokens, for a segment between two times of the window."""
        own = []
        while self._words and self._taken < num_tokens:
            own.append(self._words.pop(0))
            self._taken += own[-1].num_tokens
        self._taken -= num_tokens
        if own:
            fit_words(own, start, end, self._end, self._median)
            self._end = own[-1].end
        return [
            Word(w.word.strip(), round(self._begin + w.start, 2), round(self._begin + w.end, 2))
            for w in own
            if w.word.strip()
        ]
