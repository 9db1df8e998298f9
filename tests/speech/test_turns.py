"""Turns of a speaker."""

import numpy as np
import pytest

from octavo.speech.turns import TurnChange, TurnDetection, TurnDetector

RATE = 24_000


def sound(*parts):
    """Return int16 samples of (seconds, loudness)."""
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            rng.normal(0, loudness * 2**15, round(s * RATE)).clip(-32768, 32767)
            for s, loudness in parts
        ]
    ).astype(np.int16)


@pytest.mark.parametrize("size", [100, 480, 7001, 10**6])
def test_turns(size):
    samples = sound((1, 0.001), (1, 0.1), (0.3, 0.001), (1, 0.1), (1, 0.001), (0.5, 0.1))
    detector, found = TurnDetector(TurnDetection(), RATE), []
    for begin in range(0, len(samples), size):
        found += detector.feed(samples[begin : begin + size])
    assert found == [
        TurnChange("started", round(0.7 * RATE)),
        TurnChange("stopped", round(3.8 * RATE)),
        TurnChange("started", round(4.0 * RATE)),
    ]
    assert detector.speaking


def test_a_click_and_a_high_threshold_are_no_speech():
    clicks = sound((1, 0.001), (0.03, 0.3), (1, 0.001))
    assert TurnDetector(TurnDetection(), RATE).feed(clicks) == []
    speech = sound((1, 0.03))
    assert TurnDetector(TurnDetection(), RATE).feed(speech)
    assert TurnDetector(TurnDetection(threshold=0.9), RATE).feed(speech) == []


def test_settings():
    detection = TurnDetection(prefix_padding_ms=0, silence_duration_ms=100)
    samples = sound((0.5, 0.001), (0.5, 0.1), (0.5, 0.001))
    first = 1000 * RATE
    found = TurnDetector(detection, RATE, first).feed(samples)
    assert [change.at - first for change in found] == [RATE // 2, round(1.1 * RATE)]
