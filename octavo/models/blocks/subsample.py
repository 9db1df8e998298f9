"""Specification of the first part of Gemma 4's encoder of sounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.models.blocks.encoder_input import Arrays, EncoderItem
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.spectrogram import count_frames, halved
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.subsample import SubsampleInput
    from octavo.models.blocks.base import Parts

_CHUNK = 25
"""Tokens that are computed at once, which bounds the memory."""
_TIMES = 2 * _CHUNK + 1
"""Results of the first convolution in time that the tokens of a chunk see."""


def num_tokens(num_frames: int) -> int:
    """Return the number of tokens of a sound."""
    return halved(halved(num_frames))


@dataclass(frozen=True)
class SubsampleInputSpec:
    """Two 3 x 3 convolutions with a stride of 2, and a projection.

    The item's array is `input_features`, float32 [frames, bands]. Zeros lie beyond the edges. A
    norm of the channels and ReLU follow each convolution; neither has a bias, so that zeros remain
    zeros.
    """

    convolutions: tuple[LinearSpec, LinearSpec]
    """Layout "taps"; a tap is a time and a band."""
    norms: tuple[LayerNormSpec, LayerNormSpec]
    project: LinearSpec
    bands: int

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        count = num_tokens(count_frames(data, self.bands))
        return count, count

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(data["input_features"].astype(np.float32))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(np.zeros((4 * num_tokens, self.bands), np.float32))

    def _item(self, frames: NDArray[np.float32]) -> EncoderItem:
        count = num_tokens(len(frames))
        chunks = -(-count // _CHUNK)
        # Result t of the first convolution sees the frames 2 t - 1 to 2 t + 1, and token t the
        # results 2 t - 1 to 2 t + 1. Row 0 of `padded` is the frame -3.
        padded = np.zeros((4 * _CHUNK * chunks + 3, self.bands + 2), np.float32)
        padded[3 : 3 + len(frames), 1:-1] = frames
        times = 2 * _CHUNK * np.arange(chunks)[:, None] + np.arange(-1, _TIMES - 1)
        time, band = times[:, :, None], np.arange(halved(self.bands))
        around = np.stack(
            [padded[2 * time + 2 + i, 2 * band + j] for i in range(3) for j in range(3)], -1
        )
        around[(times < 0) | (times >= halved(len(frames)))] = 0
        rows = np.zeros((chunks, _TIMES * len(band) + 1, 9), np.float32)  # the last one stays 0
        rows[:, :-1] = around.reshape(chunks, -1, 9)
        return EncoderItem(
            count,
            (np.array([count]),),
            numbers={"spectrogram": rows.reshape(-1, 9)},
            arrays={
                "no_source": np.full(1, -1, np.int32),
                "no_slots": np.full(count, -1, np.int32),
            },
            size=count,
        )

    def taps(self) -> NDArray[np.int64]:
        """Return the inputs of the second convolution in a chunk: int64 [results, 9]."""
        bands = halved(self.bands)
        padded = np.full((_TIMES, bands + 3), _TIMES * bands)
        padded[:, 1 : bands + 1] = np.arange(_TIMES * bands).reshape(_TIMES, bands)
        time, band = np.ogrid[:_CHUNK, : halved(bands)]
        found = [padded[2 * time + i, 2 * band + j] for i in range(3) for j in range(3)]
        return np.stack(found, -1).reshape(-1, 9)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the convolutions with their norms, and the projection."""
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            yield from convolution.weights(names.of(f"convolutions.{i}"))
            yield from norm.weights(names.of(f"norms.{i}"))
        yield from self.project.weights(names.of("project"))

    def build(self, parts: Parts) -> SubsampleInput:
        """Implement `InputSpec`."""
        from octavo.layers.subsample import SubsampleInput

        first, second = (
            (convolution.build(parts.of(f"convolutions.{i}")), norm.build(parts.of(f"norms.{i}")))
            for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True))
        )
        return SubsampleInput(
            parts.ops,
            first,
            second,
            self.project.build(parts.of("project")),
            parts.ops.to_device(self.taps().ravel()),
            _TIMES * halved(self.bands) + 1,
            _CHUNK,
            self.project.inputs,
        )
