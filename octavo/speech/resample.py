"""Resampling of speech from 24 kHz, the rate of OpenAI's Realtime API, to 16 kHz."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

# Zero crossings of the sinc on each side, and the cut-off in parts of the new rate's half.
_CROSSINGS, _CUTOFF = 24, 0.94
_RATIO = 1.5


def _taps(offset: float) -> tuple[NDArray[np.intp], Samples]:
    """Return the places around a sample, and their factors: a sinc in a Hann window.

    Args:
        offset: place of the new sample between two old ones.
    """
    reach = int(np.ceil(_CROSSINGS * _RATIO / _CUTOFF))
    places = np.arange(-reach, reach + 1)
    distance = (places - offset) * _CUTOFF / _RATIO
    window = np.cos(np.pi / 2 * np.clip(distance / _CROSSINGS, -1, 1)) ** 2
    factors = np.sinc(distance) * window
    return places, (factors / factors.sum()).astype(np.float32)


def to_16_khz(samples: Samples) -> Samples:
    """Return a sound of 24 kHz at 16 kHz, by a windowed sinc.

    The n-th new sample is at the place 1.5 n of the old ones, so that two filters suffice. Before
    and after the sound there is silence.

    Args:
        samples: float32 [samples] at 24 kHz.

    Returns:
        float32 [ceil(samples / 1.5)].
    """
    count = -(-len(samples) * 2 // 3)
    result = np.empty(count, np.float32)
    for phase in (0, 1):
        places, factors = _taps(0.5 * phase)
        reach = -int(places[0])
        padded = np.pad(samples, (reach, reach + 2))
        # The new samples phase, phase + 2, ... are at the old ones phase, phase + 3, ... + offset.
        rows = np.lib.stride_tricks.sliding_window_view(padded, len(factors))[phase::3]
        result[phase::2] = rows[: len(result[phase::2])] @ factors
    return result
