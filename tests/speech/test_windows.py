"""Windows of long sounds."""

import itertools

import numpy as np

from octavo.speech.windows import Window, is_silent, split

RATE = 16_000


def test_a_short_sound_is_one_window():
    for count in (1, 29 * RATE, 30 * RATE):
        assert split(np.ones(count, np.float32), RATE, 30) == [Window(0, count)]


def test_windows_end_at_pauses():
    samples = np.random.default_rng(0).uniform(-1, 1, 70 * RATE).astype(np.float32)
    pauses = [26.3, 27.0, 52.2]
    for second in pauses:
        begin = round(second * RATE)
        samples[begin : begin + RATE // 4] *= 0.01
    samples[round(26.3 * RATE) :][: RATE // 4] *= 0.1  # the quietest one
    windows = split(samples, RATE, 30)
    assert [window.end / RATE for window in windows[:-1]] == [26.35, 52.3]
    assert windows[0].begin == 0
    assert windows[-1].end == len(samples)
    assert all(a.end == b.begin for a, b in itertools.pairwise(windows))
    assert np.array_equal(np.concatenate([w.cut(samples) for w in windows]), samples)


def test_even_sounds_have_windows_of_nearly_full_length():
    for value in (0.0, 0.5):
        windows = split(np.full(3600 * RATE, value, np.float32), RATE, 30)
        assert {w.end - w.begin for w in windows[:-1]} == {round(29.95 * RATE)}
        assert all(0 < w.end - w.begin <= 30 * RATE for w in windows)


def test_silence():
    silence = np.random.default_rng(0).normal(0, 1e-5, 3 * RATE + 5).astype(np.float32)
    assert is_silent(silence, RATE)
    assert is_silent(np.zeros(3, np.float32), RATE)
    silence[-100:] = 0.01  # a click at the end
    assert not is_silent(silence, RATE)
