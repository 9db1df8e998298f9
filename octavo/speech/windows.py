"""Division of long sounds into windows that end where they are quiet, without silence around them.

vLLM divides sounds in the same way (`_split_audio` of its speech-to-text server): each window is as
long as it may be, less the time back to the quietest moment in its last part. Here, silence before
and after a window is left out, too. Whisper makes up text for silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Seconds over which the energy is averaged.
_MOMENT = 0.1
# Part at the end of a window, in seconds, in which the quietest moment is looked for.
_SEARCHED = 5.0
# Mean square of a moment of -80 dB: of silence that was not recorded by a microphone.
_SILENCE = 1e-8
# Moments of silence that stay around a window.
_MARGIN = 2


@dataclass(frozen=True)
class Window:
    """Part of a sound, in samples."""

    begin: int
    end: int

    def cut(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the samples of the window."""
        return samples[self.begin : self.end]


def split(samples: NDArray[np.float32], sampling_rate: int, seconds: float) -> list[Window]:
    """Divide a sound into windows of at most `seconds`; silence may be between them.

    Args:
        samples: float32 [samples].
        sampling_rate: samples a second.
        seconds: longest window, more than 5.

    Returns:
        The windows; none if the sound has no speech.
    """
    return [window for window, _ in _divide(samples, sampling_rate, seconds)]


def split_part(
    samples: NDArray[np.float32], sampling_rate: int, seconds: float
) -> tuple[list[Window], int]:
    """Divide the first part of a sound, whose rest is not known yet, as `split` divides the whole.

    Args:
        samples: float32 [samples], a multiple of a tenth of a second.
        sampling_rate: samples a second.
        seconds: longest window, more than 5.

    Returns:
        The windows that the rest cannot change, and the sample with which the next part begins.
    """
    moment = part_unit(sampling_rate)
    assert len(samples) % moment == 0
    windows: list[Window] = []
    begin = 0
    for window, end in _divide(samples, sampling_rate, seconds):
        if end == len(samples):
            return windows, window.begin
        windows.append(window)
        begin = end
    return windows, max(begin, len(samples) - _MARGIN * moment)


def part_unit(sampling_rate: int) -> int:
    """Return the number of samples of which each part for `split_part` is a multiple."""
    return round(_MOMENT * sampling_rate)


def _divide(
    samples: NDArray[np.float32], sampling_rate: int, seconds: float
) -> Iterator[tuple[Window, int]]:
    """Yield each window, and the sample at which the next one may begin."""
    moment = part_unit(sampling_rate)
    longest, searched = round(seconds / _MOMENT), round(_SEARCHED / _MOMENT)
    energies = _energies(samples, moment)
    loud = np.flatnonzero(energies >= _SILENCE)
    begin = 0
    # All of these numbers are moments.
    while len(later := loud[loud >= begin]):
        begin = max(begin, int(later[0]) - _MARGIN)
        end = len(energies)
        if end - begin > longest:
            last = energies[begin + longest - searched : begin + longest]
            # Of moments that are equally quiet, the last one.
            end = begin + longest - int(np.argmin(last[::-1]))
        sound = later[later < end]
        till = min(end, int(sound[-1]) + 1 + _MARGIN)
        window = Window(begin * moment, min(till * moment, len(samples)))
        yield window, min(end * moment, len(samples))
        begin = end


def _energies(samples: NDArray[np.float32], moment: int) -> NDArray[np.float32]:
    """Return the mean square of each moment, float32 [moments]; the last one may be shorter."""
    whole = len(samples) // moment * moment
    rows = samples[:whole].reshape(-1, moment)
    # Without an array of all squares
    means: NDArray[np.float32] = np.einsum("ij,ij->i", rows, rows) / np.float32(moment)
    rest = samples[whole:]
    if len(rest):
        means = np.append(means, np.square(rest).mean())
    return means
