"""Resampling, against tones."""

import numpy as np
import pytest

from octavo.speech.resample import to_16_khz


@pytest.mark.parametrize("hertz", [100, 1000, 3000, 6500])
def test_tones_stay(hertz):
    old, new = np.arange(24_000) / 24_000, np.arange(16_000) / 16_000
    found = to_16_khz(np.sin(2 * np.pi * hertz * old).astype(np.float32))
    assert found.dtype == np.float32
    assert len(found) == 16_000
    error = found - np.sin(2 * np.pi * hertz * new)
    assert np.abs(error[200:-200]).max() < 3e-3


def test_tones_above_the_limit_vanish():
    tone = np.sin(2 * np.pi * 9500 * np.arange(24_000) / 24_000).astype(np.float32)
    assert np.abs(to_16_khz(tone)[200:-200]).max() < 3e-3


@pytest.mark.parametrize("count", range(8))
def test_lengths(count):
    assert len(to_16_khz(np.ones(count, np.float32))) == -(-2 * count // 3)
