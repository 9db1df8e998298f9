"""Division of long sounds into windows that end where they are quiet, without silence around them.

vLLM divides sounds in the same way (`_split_audio` of its speech-to-text server): each window ends
at the quietest moment in the last part of its greatest length. Here, silence before and after a
window is left out, too, because Whisper makes up text for silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

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

    def cut(self, samples: Samples) -> Samples:
        """Return the samples of the window."""
        return samples[self.begin : self.end]


def split(samples: Samples, sampling_rate: int, seconds: float) -> list[Window]:
    """Divide a sound into windows of at most `seconds`; silence may be between them.

    Args:
        samples: float32 [samples].
        sampling_rate: samples a second.
        seconds: longest window, more than 5.

    Returns:
        The windows; none if the sound has no speech.
    """
    return [window for window, _ in _divide(samples, sampling_rate, seconds)]


def split_part(samples: Samples, sampling_rate: int, seconds: float) -> tuple[list[Window], int]:
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


def _divide(samples: Samples, sampling_rate: int, seconds: float) -> Iterator[tuple[Window, int]]:
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


def _energies(samples: Samples, moment: int) -> Samples:
    """Return the mean square of each moment, float32 [moments]; the last one may be shorter."""
    whole = len(samples) // moment * moment
    rows = samples[:whole].reshape(-1, moment)
    # Without an array of all squares
    means: NDArray[np.float32] = np.einsum("ij,ij->i", rows, rows) / np.float32(moment)
    rest = samples[whole:]
    if len(rest):
        means = np.append(means, np.square(rest).mean())
    return means


class SplitSound:
    """Sound that is divided into windows, at once or while it is read.

    Args:
        samples: the sound, float32 [samples]; or its parts, each a multiple of `part_unit` except
            for the last one. Then `proceed` reads the next part.
        sampling_rate: samples a second.
        seconds: longest window, more than 5.
    """

    def __init__(
        self, samples: Samples | Iterator[Samples], sampling_rate: int, seconds: float
    ) -> None:
        self.rate, self._longest = sampling_rate, seconds
        self._first = self._rest = 0
        """Samples before `_samples`, and those of it that no later window needs."""
        self.windows: list[Window] = []
        """Parts of the samples at hand in which somebody may be speaking."""
        self._parts: Iterator[Samples] | None = None
        if isinstance(samples, np.ndarray):
            self._samples = samples
            self.windows = split(samples, sampling_rate, seconds)
        else:
            self._samples, self._parts = np.empty(0, np.float32), samples

    @property
    def seconds(self) -> float:
        """Seconds of the sound so far."""
        return (self._first + len(self._samples)) / self.rate

    def cut(self, window: Window) -> Samples:
        """Return the samples of one of `windows`."""
        return self._samples[window.begin - self._first : window.end - self._first]

    def proceed(self) -> bool:
        """Read the next part, whose windows replace `windows`; return False at the end.

        Raises:
            RequestError: the rest of the sound cannot be read.
        """
        if self._parts is None:
            return False
        first, part = self._first + self._rest, next(self._parts, None)
        self._samples = self._samples[self._rest :]
        if part is not None:
            self._samples = np.concatenate([self._samples, part])
        if part is None or len(self._samples) % part_unit(self.rate):
            self._parts, self._rest = None, len(self._samples)
            windows = split(self._samples, self.rate, self._longest)
        else:
            windows, self._rest = split_part(self._samples, self.rate, self._longest)
        self._first = first
        self.windows = [Window(first + window.begin, first + window.end) for window in windows]
        return True
