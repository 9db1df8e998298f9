"""Times of words from the weights of cross attention, as in OpenAI's Whisper (`timing.py`)."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS_PER_SECOND = 50
"""Rows of Whisper's encoder for a second of sound."""
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose writing has no spaces between words: each character is a word."""
_PREPENDED = "\"'“¿([{-"
_APPENDED = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001  # marks of Chinese and Japanese
_ENDS_SENTENCE = ".。!！?？"  # noqa: RUF001
# Longest median of the durations of words, in seconds. A word of more than two medians beside the
# end of a sentence includes a pause.
_MAX_MEDIAN = 0.7
# Medians of a pause after which the first words are shortened.
_PAUSE = 4
# Seconds by which the times of a segment and of its words may differ.
_LEEWAY = 0.5


@dataclass
class Word:
    """Word of a transcript; the fields are those of OpenAI's `verbose_json`."""

    word: str
    """The word with its punctuation, without spaces around it."""
    start: float
    """Seconds from the begin of the sound."""
    end: float


@dataclass
class TimedWord:
    """Word of a window, and its number of tokens."""

    word: str
    start: float
    """Seconds from the begin of the window."""
    end: float
    num_tokens: int


def split_words(
    tokens: Sequence[int], decode: Callable[[list[int]], str], language: str | None
) -> list[tuple[str, int]]:
    """Divide tokens of text into words; return each word and its number of tokens.

    Args:
        tokens: tokens without special ones.
        decode: returns the text of tokens.
        language: code of the language.
    """
    words: list[tuple[str, int]] = []
    for text, count in _split_characters(tokens, decode):
        begins = text.startswith(" ") or text.strip() in string.punctuation
        if language in WITHOUT_SPACES or begins or not words:
            words.append((text, count))
        else:
            before, count_before = words[-1]
            words[-1] = before + text, count_before + count
    return words


def _split_characters(
    tokens: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[str, int]]:
    """Divide tokens where the text so far ends with a whole character."""
    parts: list[tuple[str, int]] = []
    whole, at, begin = decode(list(tokens)), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[begin:end]))
        # A text may contain the replacement character itself.
        if "\ufffd" not in text or text == whole[at : at + len(text)]:
            parts.append((text, end - begin))
            at, begin = at + len(text), end
    if begin < len(tokens):
        parts.append((whole[at:], len(tokens) - begin))
    return parts


def warp(cost: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the first column of each row on the cheapest path, int64 [rows].

    The path begins in the first row and column, ends in the last ones, and each step leads to the
    next row, the next column or both (dynamic time warping; H. Sakoe and S. Chiba, 1978).

    Args:
        cost: float32 [rows, columns], cost of each place on the path.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    for i in range(rows):
        # total[i + 1, j + 1] = cost[i, j] + min(from above, total[i + 1, j]): with the sums of the
        # row's costs, this is a running minimum.
        above = np.minimum(total[i, :-1], total[i, 1:])
        sums = np.cumsum(cost[i], dtype=np.float64)
        before = np.concatenate([[0.0], sums[:-1]])
        total[i + 1, 1:] = sums + np.minimum.accumulate(above - before)
    first = np.zeros(rows, np.int64)
    i, j = rows, columns
    while i > 0:
        first[i - 1] = j - 1
        both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        if both < up and both < left:
            i, j = i - 1, j - 1
        elif up < both and up < left:
            i -= 1
        elif j > 1:
            j -= 1
        else:
            i -= 1
    return first


def time_words(
    weights: NDArray[np.float32],
    tokens: Sequence[int],
    decode: Callable[[list[int]], str],
    language: str | None,
) -> list[TimedWord]:
    """Return the words of a window, with punctuation joined to them.

    Args:
        weights: float32 [tokens + 1, rows of the encoder]: of each token, and of the end.
        tokens: the window's tokens of text.
        decode: returns the text of tokens.
        language: code of the language.
    """
    times = warp(-weights) / ROWS_PER_SECOND
    words, at = [], 0
    for text, count in split_words(tokens, decode, language):
        words.append(TimedWord(text, float(times[at]), float(times[at + count]), count))
        at += count
    longest = 2 * median_duration(words)
    for before, word in zip([None, *words], words, strict=False):
        if before is None or word.end - word.start <= longest:
            continue
        if word.word in _ENDS_SENTENCE:
            word.end = word.start + longest
        elif before.word in _ENDS_SENTENCE:
            word.start = word.end - longest
    return _join_punctuation(words)


def median_duration(words: Sequence[TimedWord]) -> float:
    """Return the median of the words' durations, in seconds."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    return min(_MAX_MEDIAN, float(np.median(durations))) if durations else 0.0


def _join_punctuation(words: Sequence[TimedWord]) -> list[TimedWord]:
    """Return words with the marks that belong to them; each keeps its own times."""
    joined: list[TimedWord] = []
    for word in reversed(words):  # marks before a word
        if joined and word.word.startswith(" ") and word.word.strip() in _PREPENDED:
            after = joined[-1]
            after.word, after.num_tokens = (
                word.word + after.word,
                word.num_tokens + after.num_tokens,
            )
        else:
            joined.append(word)
    result: list[TimedWord] = []
    for word in reversed(joined):  # marks after a word
        if result and not result[-1].word.endswith(" ") and word.word in _APPENDED:
            result[-1].word += word.word
            result[-1].num_tokens += word.num_tokens
        else:
            result.append(word)
    return result


def fit_words(
    words: list[TimedWord], start: float, end: float, last_end: float, median: float
) -> None:
    """Shorten the first and the last word of a segment that include a pause.

    Args:
        words: words of the segment; changed in place.
        start: begin of the segment, in seconds of the window.
        end: its end.
        last_end: end of the segment before.
        median: median of the durations of the window's words.
    """
    first, last, longest = words[0], words[-1], 2 * median
    second = words[1] if len(words) > 1 else None
    if first.end - last_end > _PAUSE * median and (
        first.end - first.start > longest
        or (second is not None and second.end - first.start > 2 * longest)
    ):
        if second is not None and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0.0, first.end - longest)
    if start < first.end and start - _LEEWAY > first.start:
        first.start = max(0.0, min(first.end - median, start))
    if end > last.start and end + _LEEWAY < last.end:
        last.end = max(last.start + median, end)
