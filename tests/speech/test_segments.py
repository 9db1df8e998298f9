"""Segments from tokens, and the judgement of an answer."""

import pytest

from octavo.speech.segments import Decoded, make_segments
from octavo.speech.tokens import WhisperTokens

SPECIAL = WhisperTokens(101, 100, 102, 103, 104, {}, {})
ZERO = SPECIAL.first_timestamp
WORDS = {1: " one", 2: " two", 3: " three", 4: " "}


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


def decoded(tokens, text="text", avg_logprob=-0.5, no_speech_prob=0.1):
    return Decoded(tokens, avg_logprob, no_speech_prob, 0.2, text)


def times(tokens, begin=0.0, seconds=30.0):
    made = make_segments(decoded(tokens), SPECIAL, decode, begin, seconds, 7)
    assert [segment.id for segment in made] == list(range(7, 7 + len(made)))
    return [(segment.start, segment.end, segment.text) for segment in made]


def test_texts_between_timestamps():
    tokens = [ZERO, 1, 2, ZERO + 100, ZERO + 150, 3, ZERO + 200]
    assert times(tokens) == [(0, 2, " one two"), (3, 4, " three")]
    assert times(tokens, begin=60.5) == [(60.5, 62.5, " one two"), (63.5, 64.5, " three")]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1, 2], [(0, 10, " one two")]),
        ([ZERO + 50, 1], [(1, 10, " one")]),
        ([ZERO, 1, ZERO + 50, ZERO + 50], [(0, 1, " one")]),
        ([ZERO, 1, ZERO + 50, ZERO + 50, 2], [(0, 1, " one"), (1, 10, " two")]),
        ([ZERO, ZERO + 50], []),
        ([ZERO, 4, ZERO + 50], []),
        ([ZERO, 1, ZERO + 50, 2, ZERO + 100], [(0, 1, " one"), (1, 2, " two")]),
        # Times after the window's end, of a sound that is shorter than 30 s
        ([ZERO, 1, ZERO + 1500], [(0, 10, " one")]),
        ([ZERO + 1000, 1, ZERO + 1500], [(10, 10, " one")]),
        ([ZERO + 100, 1, ZERO + 50], [(2, 2, " one")]),
    ],
)
def test_incomplete_answers(tokens, expected):
    assert times(tokens, seconds=10.0) == expected


def test_fields():
    (segment,) = make_segments(decoded([ZERO, 1, ZERO + 1], "a" * 90), SPECIAL, decode, 1.5, 9, 0)
    assert (segment.seek, segment.tokens) == (150, [ZERO, 1, ZERO + 1])
    assert (segment.temperature, segment.avg_logprob, segment.no_speech_prob) == (0.2, -0.5, 0.1)
    assert segment.compression_ratio == pytest.approx(90 / 12)


def test_judgement():
    assert decoded([]).is_good
    assert decoded([], "").compression_ratio == 0
    assert not decoded([], avg_logprob=-1.1).is_good
    assert not decoded([], "again and " * 20).is_good
    assert decoded([], "A long text with many words that does not repeat itself at all.").is_good
    silence = decoded([], avg_logprob=-1.1, no_speech_prob=0.7)
    assert silence.is_silence
    assert silence.is_good
    assert not decoded([], no_speech_prob=0.7).is_silence
