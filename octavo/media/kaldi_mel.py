"""Log-mel spectrograms with Kaldi's mel scale, as Phi-4 multimodal reads them.

The features are those of transformers' `Phi4MultimodalFeatureExtractor`: pre-emphasis within each
frame, power of a short-time Fourier transform with a Hamming window, triangles on Kaldi's mel
scale, and natural logarithm of at least 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.media.audio import SAMPLE_RATE

Floats = NDArray[np.float32]

_EXTRACTORS = (None, "Phi4MultimodalFeatureExtractor", "Phi4MMAudioFeatureExtractor")
_PEAK = np.float32(32768)
_FRAMES_AT_ONCE = 1000


@dataclass(frozen=True)
class KaldiMel:
    """Settings of the features; the names are those of preprocessor_config.json."""

    feature_size: int = 80
    """Number of mel bands."""
    sampling_rate: int = SAMPLE_RATE
    win_length: int = 400
    """Samples of a frame."""
    hop_length: int = 160
    """Samples from a frame to the next one."""
    n_fft: int = 512
    preemphasis: float = 0.97
    mel_min_frequency: float = 0.0
    mel_max_frequency: float = 7690.0

    @classmethod
    def from_config(cls, config: ConfigJson) -> KaldiMel:
        """Read the settings; absent ones have transformers' defaults.

        Raises:
            ModelError: a value is wrong, or not supported.
        """
        if config.get("feature_extractor_type") not in _EXTRACTORS:
            raise config.error("feature_extractor_type", f"only {_EXTRACTORS[1]} is supported")
        for name, only in (
            ("sampling_rate", SAMPLE_RATE),
            ("padding_value", 0.0),
            ("audio_compression_rate", 8),
            ("audio_downsample_rate", 1),
            ("audio_feat_stride", 1),
        ):
            config.refuse(name, only, f"only {only} is supported")
        low = config.number("mel_min_frequency", default=cls.mel_min_frequency)
        high = config.number("mel_max_frequency", default=cls.mel_max_frequency)
        if not 0 <= low < high <= SAMPLE_RATE / 2:
            raise config.error(
                "mel_max_frequency",
                f"it must be above mel_min_frequency, and at most {SAMPLE_RATE // 2}",
            )
        length = config.integer("win_length", default=cls.win_length, least=2, most=SAMPLE_RATE)
        return cls(
            config.integer("feature_size", default=cls.feature_size, most=1024),
            win_length=length,
            hop_length=config.integer("hop_length", default=cls.hop_length, most=SAMPLE_RATE),
            n_fft=config.integer("n_fft", default=cls.n_fft, least=length, most=2 * SAMPLE_RATE),
            preemphasis=config.number("preemphasis", default=cls.preemphasis),
            mel_min_frequency=low,
            mel_max_frequency=high,
        )

    def num_frames(self, num_samples: int) -> int:
        """Return the number of whole frames of a sound."""
        return max(0, (num_samples - self.win_length) // self.hop_length + 1)

    def compute(self, samples: Floats) -> Floats:
        """Return the features of a sound [samples], with values in [-1, 1]: [frames, bands]."""
        windows = np.lib.stride_tricks.sliding_window_view(samples, self.win_length)
        windows = windows[:: self.hop_length]
        weights, factor = _triangles(self), np.float32(self.preemphasis)
        result = np.empty((len(windows), self.feature_size), np.float32)
        for begin in range(0, len(windows), _FRAMES_AT_ONCE):
            frames = windows[begin : begin + _FRAMES_AT_ONCE]
            before = np.roll(frames, 1, -1)
            before[:, 0] = before[:, 1]
            frames = (frames - factor * before) * _PEAK
            spectrum = np.fft.rfft(frames * np.hamming(self.win_length), n=self.n_fft, axis=-1)
            power = np.abs(spectrum.astype(np.complex64)) ** 2
            bands = np.maximum(power @ weights, np.float32(1))
            result[begin : begin + len(frames)] = np.log(bands)
        return result


@functools.cache
def _triangles(settings: KaldiMel) -> Floats:
    """Return the weights of the frequencies in each band: float32 [frequencies, bands].

    The triangles have straight sides on the mel scale.
    """

    def mel(frequency: NDArray[Any]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = 1127.0 * np.log(1.0 + frequency / 700.0)
        return scaled

    low, high = mel(np.array([settings.mel_min_frequency, settings.mel_max_frequency]))
    corners = np.linspace(low, high, settings.feature_size + 2)
    bins = settings.n_fft // 2 + 1
    at = mel(settings.sampling_rate / (2 * (bins - 1)) * np.arange(bins))[:, None]
    rising = (at - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - at) / (corners[2:] - corners[1:-1])
    weights: Floats = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    return weights
