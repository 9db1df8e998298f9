"""Log-mel spectrograms: the features of speech models such as Whisper, in numpy.

The features are those of Whisper (https://github.com/openai/whisper, `audio.py`) and of
transformers' `WhisperFeatureExtractor`: power of a short-time Fourier transform with a Hann window,
mel bands of Slaney's scale with equal areas, decimal logarithm, at most 8 (80 dB) below the
window's maximum, and then (x + 4) / 4. Products and sums are computed in float32, which differs
from transformers by less than 1e-4.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.media.audio import SAMPLE_RATE

Floats = NDArray[np.float32]

_MAX_FREQUENCY = 8000.0
# Slaney's scale is linear below 1 kHz, which is mel 15, and logarithmic above.
_LINEAR_HZ, _LINEAR_MEL, _HZ_OF_MEL = 1000.0, 15.0, 200.0 / 3
_LOG_STEP = np.log(6.4) / 27
_FLOOR = np.float32(1e-10)
_FRAMES_AT_ONCE = 250
_EXTRACTOR = "WhisperFeatureExtractor"


@dataclass(frozen=True)
class LogMel:
    """Settings of the features; the names are those of preprocessor_config.json."""

    feature_size: int = 80
    """Number of mel bands."""
    sampling_rate: int = SAMPLE_RATE
    hop_length: int = 160
    """Samples from a frame to the next one."""
    chunk_length: int = 30
    """Seconds of a window."""
    n_fft: int = 400
    """Samples of a frame."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> LogMel:
        """Read the settings of a preprocessor_config.json; absent ones have transformers' defaults.

        Args:
            config: the file's content.
            where: name of the file, for errors.

        Raises:
            ModelError: a value is wrong, or not supported.
        """
        kind = config.get("feature_extractor_type", _EXTRACTOR)
        if kind != _EXTRACTOR:
            raise ModelError(
                f"{where}: feature_extractor_type={kind!r} is not supported; use {_EXTRACTOR}."
            )
        fixed = {"padding_value": 0.0, "dither": 0.0, "sampling_rate": SAMPLE_RATE}
        for name, only in fixed.items():
            if config.get(name, only) != only:
                raise ModelError(
                    f"{where}: {name}={config[name]!r} is not supported; only {only} is."
                )
        values: dict[str, int] = {}
        for name, most in (
            ("feature_size", 256),
            ("hop_length", 4096),
            ("chunk_length", 60),
            ("n_fft", 4096),
        ):
            if name in config:
                value = config[name]
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                    raise ModelError(
                        f"{where}: {name}={value!r} is wrong; it must be a whole number from 1 to "
                        f"{most}."
                    )
                values[name] = value
        made = cls(**values)
        if made.n_fft % 2 or made.n_fft < made.hop_length:
            raise ModelError(
                f"{where}: n_fft={made.n_fft} must be even, and at least "
                f"hop_length={made.hop_length}."
            )
        return made

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.chunk_length * self.sampling_rate

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return self.num_samples // self.hop_length

    @property
    def nbytes(self) -> int:
        """Bytes of the features of a window."""
        return 4 * self.feature_size * self.num_frames

    def compute(self, samples: Floats, num_windows: int = 1) -> Floats:
        """Return the features of successive windows, float32 [feature_size, windows * num_frames].

        They are those of one long window: all have the same maximum.

        Args:
            samples: float32 [samples], at most `num_samples` a window; silence follows.
            num_windows: number of windows.
        """
        num_samples = num_windows * self.num_samples
        assert len(samples) <= num_samples
        return self._compute(samples, num_samples)

    def compute_exactly(self, samples: Floats) -> Floats:
        """Return the features of samples without silence after them.

        Args:
            samples: float32 [samples], at least `n_fft`.

        Returns:
            float32 [feature_size, samples // hop_length].
        """
        return self._compute(samples, len(samples))

    def _compute(self, samples: Floats, num_samples: int) -> Floats:
        assert samples.ndim == 1
        num_frames = num_samples // self.hop_length
        half = self.n_fft // 2
        padded = np.zeros(num_samples + 2 * half, np.float32)
        padded[half : half + len(samples)] = samples
        # The window continues in both directions with its mirror image.
        padded[:half] = padded[half + 1 : 2 * half + 1][::-1]
        padded[-half:] = padded[-2 * half - 1 : -half - 1][::-1]
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        mel = np.zeros((self.feature_size, num_frames), np.float32)
        # The frames after the samples are silent.
        sounding = min(num_frames, -(-(len(samples) + half) // self.hop_length))
        for begin in range(0, sounding, _FRAMES_AT_ONCE):
            end = min(begin + _FRAMES_AT_ONCE, num_frames)
            spectrum = np.fft.rfft(frames[begin:end] * _window(self.n_fft), axis=1)
            power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
            mel[:, begin:end] = _bands(np.ascontiguousarray(power.T), self)
        np.log10(np.maximum(mel, _FLOOR), out=mel)
        np.maximum(mel, mel.max() - np.float32(8), out=mel)
        mel += np.float32(4)
        mel /= np.float32(4)
        return mel


@functools.cache
def _window(size: int) -> Floats:
    """Return a periodic Hann window, float32 [size]."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)


def _mel_of_hz(frequency: float) -> float:
    if frequency < _LINEAR_HZ:
        return frequency / _HZ_OF_MEL
    return _LINEAR_MEL + float(np.log(frequency / _LINEAR_HZ)) / float(_LOG_STEP)


class _Triangles(NamedTuple):
    """Weights of the frequencies in the bands."""

    rising: Floats
    """Weight of each frequency in the band that it is left of the center of, [frequencies, 1]."""
    falling: Floats
    """Weight of each frequency in the band before, [frequencies, 1]."""
    begins: NDArray[np.intp]
    """First frequency between two neighboring edges that have one, in order."""
    places: NDArray[np.intp]
    """Number of the lower one of these edges."""


def _bands(power: Floats, settings: LogMel) -> Floats:
    """Return the power in each band, float32 [feature_size, frames].

    A frequency is in two bands at most, so sums of neighbors take less time than a product of
    matrices. They also need no threads, which the engine may be using.

    Args:
        power: float32 [frequencies, frames].
        settings: the settings.
    """
    weights, count = _triangles(settings), settings.feature_size
    used = power[: len(weights.rising)]
    mel = np.zeros((count + 2, power.shape[1]), np.float32)
    # Between the edges i and i + 1, band i rises (from edge i to its center, edge i + 1), and band
    # i - 1 falls. The row of band i is i + 1.
    mel[weights.places + 1] = np.add.reduceat(used * weights.rising, weights.begins, axis=0)
    mel[weights.places] += np.add.reduceat(used * weights.falling, weights.begins, axis=0)
    return mel[1 : count + 1]


@functools.cache
def _triangles(settings: LogMel) -> _Triangles:
    """Return the weights; a band is a triangle between the centers of its neighbors."""
    count = settings.feature_size
    mels = np.linspace(0.0, _mel_of_hz(_MAX_FREQUENCY), count + 2)
    edges = np.where(
        mels < _LINEAR_MEL,
        mels * _HZ_OF_MEL,
        _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MEL)),
    )
    frequencies = np.linspace(0.0, settings.sampling_rate // 2, settings.n_fft // 2 + 1)
    frequencies = frequencies[frequencies < _MAX_FREQUENCY]
    lower = np.searchsorted(edges, frequencies, side="right") - 1
    width = edges[lower + 1] - edges[lower]
    # The area of all bands is the same. Bands 0 to count - 1 are triangles; others do not matter.
    area = np.ones(count + 2)
    area[:count] = 2.0 / (edges[2:] - edges[:-2])
    rising = (frequencies - edges[lower]) / width * area[lower]
    falling = (edges[lower + 1] - frequencies) / width * area[np.maximum(lower - 1, 0)]
    places, begins = np.unique(lower, return_index=True)
    return _Triangles(
        rising[:, None].astype(np.float32), falling[:, None].astype(np.float32), begins, places
    )
