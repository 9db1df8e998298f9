"""Specification of the first part of an encoder that reads spectrograms as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.models.blocks.encoder_input import Arrays, EncoderItem
from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.spectrogram import SpectrogramInput
    from octavo.models.blocks.base import Parts

CHUNK = 100
"""Frames of a chunk, which the convolutions see alone."""
_MAX_TIMESCALE = 10_000.0


def halved(size: int) -> int:
    """Return the length of the result of a convolution with a stride of 2; 0 stays 0."""
    return (size + 1) // 2


def count_frames(data: Arrays, bands: int) -> int:
    """Return the number of frames of an item.

    Raises:
        RequestError: the frames do not have `bands` numbers each.
    """
    frames = data["input_features"]
    if frames.ndim != 2 or frames.shape[1] != bands or not len(frames):
        raise RequestError(
            f"'input_features' has the shape {frames.shape}; the encoder reads frames of "
            f"{bands} numbers."
        )
    return len(frames)


def num_tokens(num_frames: int) -> int:
    """Return the number of tokens of a sound."""
    whole, rest = divmod(num_frames, CHUNK)
    return whole * _after(CHUNK) + _after(rest)


def _after(size: int) -> int:
    return halved(halved(halved(size)))


def taps(times: int, bands: int) -> NDArray[np.int64]:
    """Return the inputs of a 3 x 3 convolution with a stride of 2: int64 [results, 9].

    Inputs and results are in order of time, then of band; `times * bands` stands for a zero.
    """
    padded = np.full((times + 3, bands + 3), times * bands)
    padded[1 : times + 1, 1 : bands + 1] = np.arange(times * bands).reshape(times, bands)
    time, band = np.ogrid[: halved(times), : halved(bands)]
    # The taps are in the order of the weight: band, then time.
    found = [padded[2 * time + j, 2 * band + i] for i in range(3) for j in range(3)]
    return np.stack(found, -1).reshape(-1, 9)


@dataclass(frozen=True)
class SpectrogramInputSpec:
    """Three convolutions over chunks of 1 s, and a projection (Qwen3-ASR).

    The item's array is `input_features`, float32 [frames, bands]. Tokens have sinusoids of their
    place in the chunk. A token sees those of its own window of several chunks.
    """

    convolutions: tuple[LinearSpec, LinearSpec, LinearSpec]
    """3 x 3, with a stride of 2, zeros beyond the edges and GELU; layout "taps"."""
    project: LinearSpec
    bands: int
    channels: int
    hidden_size: int
    window: int
    """Chunks of a window."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        count = num_tokens(count_frames(data, self.bands))
        return count, count

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(data["input_features"].astype(np.float32))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        frames = CHUNK * (num_tokens // _after(CHUNK))
        return self._item(np.zeros((frames, self.bands), np.float32))

    def _item(self, frames: NDArray[np.float32]) -> EncoderItem:
        count, per_chunk = num_tokens(len(frames)), _after(CHUNK)
        chunks = -(-len(frames) // CHUNK)
        padded = np.zeros((chunks, CHUNK * self.bands + 1), np.float32)
        for i, chunk in enumerate(np.split(frames, range(CHUNK, len(frames), CHUNK))):
            padded[i, : chunk.size] = chunk.ravel()
        around = padded[:, taps(CHUNK, self.bands)].reshape(-1, 9)
        window = self.window * min(count, per_chunk)
        segments = [window] * (count // window) + ([count % window] if count % window else [])
        return EncoderItem(
            count,
            (np.array(segments),),
            numbers={
                "spectrogram": around,
                "times": self._sinusoids()[np.arange(count) % per_chunk],
                "zeros": np.zeros((1, self.channels), np.float32),
            },
            size=count,
        )

    def _sinusoids(self) -> NDArray[np.float32]:
        """Return the vectors of the places in a chunk: float32 [places, hidden_size]."""
        half = self.hidden_size // 2
        step = np.float32(-math.log(_MAX_TIMESCALE) / (half - 1))
        rates = np.exp(step * np.arange(half, dtype=np.float32))
        angles = np.arange(_after(CHUNK), dtype=np.float32)[:, None] * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the convolutions and the projection."""
        for i, convolution in enumerate(self.convolutions):
            yield from convolution.weights(names.of(f"convolutions.{i}"))
        yield from self.project.weights(names.of("project"))

    def build(self, parts: Parts) -> SpectrogramInput:
        """Implement `InputSpec`."""
        from octavo.layers.spectrogram import SpectrogramInput

        times, bands = halved(CHUNK), halved(self.bands)
        second, third = taps(times, bands), taps(halved(times), halved(bands))
        return SpectrogramInput(
            parts.ops,
            [
                convolution.build(parts.of(f"convolutions.{i}"))
                for i, convolution in enumerate(self.convolutions)
            ],
            self.project.build(parts.of("project")),
            (times * bands, len(second), len(third)),
            [parts.ops.to_device(rows.ravel()) for rows in (second, third)],
            _after(CHUNK),
        )
