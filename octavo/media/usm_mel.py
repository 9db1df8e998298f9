"""Log-mel spectrograms of the Universal Speech Model (arXiv:2303.01037), as Gemma 4 reads them.

The features are those of transformers' `Gemma4AudioFeatureExtractor`: magnitudes of a short-time
Fourier transform with a Hann window, triangles of HTK's mel scale, and natural logarithm of the sum
and a small number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.media.audio import SAMPLE_RATE

Floats = NDArray[np.float32]

_EXTRACTOR = "Gemma4AudioFeatureExtractor"


@dataclass(frozen=True)
class UsmMel:
    """Settings of the features; the names are those of preprocessor_config.json."""

    feature_size: int = 128
    """Number of mel bands."""
    sampling_rate: int = SAMPLE_RATE
    frame_length: int = 320
    """Samples of a frame."""
    hop_length: int = 160
    """Samples from a frame to the next one."""
    min_frequency: float = 0.0
    max_frequency: float = 8000.0
    mel_floor: float = 1e-3
    """Number that is added before the logarithm."""

    @classmethod
    def from_config(cls, config: ConfigJson) -> UsmMel:
        """Read the settings; absent ones have transformers' defaults.

        Raises:
            ModelError: a value is wrong, or not supported.
        """
        config.refuse("feature_extractor_type", _EXTRACTOR, f"only {_EXTRACTOR} is supported")
        for name, only in (
            ("sampling_rate", SAMPLE_RATE),
            ("padding_value", 0.0),
            ("preemphasis", 0.0),
            ("dither", 0.0),
            ("input_scale_factor", 1.0),
            ("fft_overdrive", False),
            ("per_bin_mean", None),
            ("per_bin_stddev", None),
        ):
            config.refuse(name, only, f"only {only} is supported")
        for name, only in (("frame_length_ms", 20.0), ("hop_length_ms", 10.0)):
            config.refuse(name, only, f"set {name.removesuffix('_ms')}, in samples, instead")
        low = config.number("min_frequency", default=cls.min_frequency)
        high = config.number("max_frequency", default=cls.max_frequency)
        if not 0 <= low < high <= SAMPLE_RATE / 2:
            raise config.error(
                "max_frequency", f"it must be above min_frequency, and at most {SAMPLE_RATE // 2}"
            )
        return cls(
            config.integer("feature_size", default=cls.feature_size, most=1024),
            frame_length=config.integer(
                "frame_length", default=cls.frame_length, least=2, most=SAMPLE_RATE
            ),
            hop_length=config.integer("hop_length", default=cls.hop_length, most=SAMPLE_RATE),
            min_frequency=low,
            max_frequency=high,
            mel_floor=config.positive("mel_floor", cls.mel_floor),
        )

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of a sound.

        Half a frame of silence precedes a sound. A frame counts if the sound also has the sample
        after it.
        """
        rest = num_samples - 1 - (self.frame_length - self.frame_length // 2)
        return max(0, rest // self.hop_length + 1)

    def compute(self, samples: Floats) -> Floats:
        """Return the features of a sound [samples], with values in [-1, 1]: [frames, bands]."""
        count, size = self.num_frames(len(samples)), self.frame_length
        padded = np.concatenate([np.zeros(size // 2, np.float32), samples])
        frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: self.hop_length][:count]
        length = 1 << (size - 1).bit_length()
        magnitudes = np.abs(np.fft.rfft(frames * _window(size), n=length, axis=-1))
        sums = magnitudes @ _triangles(self, length // 2 + 1)
        return np.log(sums + self.mel_floor).astype(np.float32)


@functools.cache
def _window(size: int) -> Floats:
    """Return the periodic Hann window [size]."""
    angles = 2 * np.pi * np.arange(size) / size
    return (0.5 - 0.5 * np.cos(angles)).astype(np.float32)


@functools.cache
def _triangles(settings: UsmMel, bins: int) -> NDArray[np.float64]:
    """Return the weights of the frequencies in each band: float64 [bins, bands]."""
    edges = np.array([settings.min_frequency, settings.max_frequency])
    low, high = 2595 * np.log10(1 + edges / 700)
    mels = np.linspace(low, high, settings.feature_size + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    frequencies = np.linspace(0, settings.sampling_rate / 2, bins)[:, None]
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    return np.maximum(0, np.minimum(rising, falling))
