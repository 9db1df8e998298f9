"""Division of long sounds into windows that end where they are quiet.

vLLM divides sounds in the same way (`_split_audio` of its speech-to-text server): each window is as
long as it may be, less the time back to the quietest moment in its last part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Seconds over which the energy is averaged.
_MOMENT = 0.1
# Part at the end of a window, in seconds, in which the quietest moment is looked for.
_SEARCHED = 5.0
# Root mean square of a moment of -80 dB; noise of a 16-bit converter is louder.
_SILENCE = 1e-4


@dataclass(frozen=True)
class Window:
    """Part of a sound, in samples."""

    begin: int
    end: int

    def cut(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the samples of the window."""
        return samples[self.begin : self.end]


def split(samples: NDArray[np.float32], sampling_rate: int, seconds: float) -> list[Window]:
    """Divide a sound into windows, without gaps, of at most `seconds`.

    Args:
        samples: float32 [samples].
        sampling_rate: samples a second.
        seconds: longest window, more than 5.
    """
    longest, searched = round(seconds * sampling_rate), round(_SEARCHED * sampling_rate)
    moment = round(_MOMENT * sampling_rate)
    windows, begin = [], 0
    while len(samples) - begin > longest:
        first = begin + longest - searched
        energies = _energies(samples[first : begin + longest], moment)
        # The middle of the quietest moment; of equal ones, the last.
        quietest = len(energies) - 1 - int(np.argmin(energies[::-1]))
        end = first + quietest * moment + moment // 2
        windows.append(Window(begin, end))
        begin = end
    windows.append(Window(begin, len(samples)))
    return windows


def is_silent(samples: NDArray[np.float32], sampling_rate: int) -> bool:
    """Return True if no moment is louder than -80 dB, so that nobody can be speaking."""
    moment = round(_MOMENT * sampling_rate)
    padded = np.zeros(-(-len(samples) // moment) * moment, np.float32)
    padded[: len(samples)] = samples
    return bool((_energies(padded, moment) < _SILENCE**2).all())


def _energies(samples: NDArray[np.float32], moment: int) -> NDArray[np.float32]:
    """Return the mean square of each moment, float32 [moments]."""
    squares = np.square(samples.reshape(-1, moment))
    means: NDArray[np.float32] = squares.mean(axis=1)
    return means
