"""Windows of long sounds."""

import itertools

import numpy as np
import pytest

from octavo.speech.windows import Window, part_unit, split, split_part

RATE = 16_000


def noise(seconds, loudness=1.0):
    count = round(seconds * RATE)
    return np.random.default_rng(0).uniform(-loudness, loudness, count).astype(np.float32)


@pytest.mark.parametrize("count", [1, 1599, 1600, 29 * RATE + 7, 30 * RATE])
def test_a_short_sound_is_one_window(count):
    assert split(np.ones(count, np.float32), RATE, 30) == [Window(0, count)]


def test_windows_end_at_pauses():
    samples = noise(70.03)
    for second in (26.3, 27.0, 52.2):
        samples[round(second * RATE) :][: RATE // 4] *= 0.01
    samples[round(26.3 * RATE) :][: RATE // 4] *= 0.1  # the quietest one
    windows = split(samples, RATE, 30)
    # After the quietest moment
    assert [window.end / RATE for window in windows] == [26.4, 52.3, 70.03]
    assert windows[0].begin == 0
    assert all(a.end == b.begin for a, b in itertools.pairwise(windows))
    assert np.array_equal(np.concatenate([w.cut(samples) for w in windows]), samples)


def test_even_sounds_have_windows_of_full_length():
    windows = split(np.full(600 * RATE, 0.5, np.float32), RATE, 30)
    assert windows == [Window(i * 30 * RATE, (i + 1) * 30 * RATE) for i in range(20)]


def test_silence_is_left_out():
    quiet = noise(50, 1e-5)
    assert split(quiet, RATE, 30) == []
    assert split(np.zeros(3, np.float32), RATE, 30) == []
    samples = np.concatenate([quiet, noise(40), quiet, noise(1), quiet])
    windows = [(w.begin / RATE, w.end / RATE) for w in split(samples, RATE, 30)]
    assert [begin for begin, _ in windows] == [49.8, windows[0][1], 139.8]
    assert [end for _, end in windows[1:]] == [90.2, 141.2]
    assert all(end - begin <= 30 for begin, end in windows)


def test_a_click_at_the_end_is_no_silence():
    samples = np.zeros(61 * RATE + 5, np.float32)
    samples[-1] = 1.0
    assert split(samples, RATE, 30) == [Window(round(60.8 * RATE), len(samples))]


@pytest.mark.parametrize("seed", range(6))
def test_parts_have_the_windows_of_the_whole(seed):
    """Sounds with pauses and digital silence, in parts of several lengths."""
    rng = np.random.default_rng(seed)
    rate, pieces = 100, []
    while sum(map(len, pieces)) < 150 * rate:
        loud = rng.normal(0, rng.choice([0.001, 0.1]), rng.integers(1, 9 * rate))
        pieces += [loud, np.zeros(rng.choice([0, 7, 30, 15 * rate], p=[0.4, 0.2, 0.3, 0.1]))]
    samples = np.concatenate(pieces).astype(np.float32)
    expected = split(samples, rate, 30)
    for unit in (1, 7, 130, 350):
        size, found, first = unit * part_unit(rate), [], 0
        buffer = np.empty(0, np.float32)
        for begin in range(0, len(samples) - size, size):
            buffer = np.concatenate([buffer, samples[begin : begin + size]])
            windows, rest = split_part(buffer, rate, 30)
            found += [Window(first + w.begin, first + w.end) for w in windows]
            buffer, first = buffer[rest:], first + rest
            assert len(buffer) <= 30 * rate + size
        buffer = samples[first:]
        found += [Window(first + w.begin, first + w.end) for w in split(buffer, rate, 30)]
        assert found == expected
