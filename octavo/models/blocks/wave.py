"""Specification of the first part of an encoder that reads samples of sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.models.blocks.encoder_input import Arrays, EncoderItem
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec, Ones, ones
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.wave import WaveInput
    from octavo.models.blocks.base import Parts

TAPS, STRIDES = (127, 7, 3), (64, 3, 2)
"""Taps and strides of the three convolutions."""


def lengths(num_samples: int) -> tuple[int, ...]:
    """Return the number of samples, and the lengths of the results of the convolutions."""
    found = [num_samples]
    for taps, stride in zip(TAPS, STRIDES, strict=True):
        found.append(max(0, (found[-1] - taps) // stride + 1))
    return tuple(found)


@dataclass(frozen=True)
class WaveInputSpec:
    """Three convolutions over samples, without padding (Moonshine, arXiv:2410.15608, section 3).

    The item's array is `input_features`, float32 [samples, 1]. The first convolution has tanh and
    then a norm of all numbers of the item, with a weight and a bias of each channel. The others
    have GELU.
    """

    first: LinearSpec
    second: LinearSpec
    third: LinearSpec
    """The convolutions, with the layout "taps"."""
    norm: LayerNormSpec
    """Names, size and epsilon of the norm's parameters."""
    max_num_samples: int

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        samples = data["input_features"]
        num_tokens = lengths(len(samples))[-1]
        if samples.ndim != 2 or samples.shape[1] != 1 or not num_tokens:
            raise RequestError(
                f"'input_features' has the shape {samples.shape}; the encoder reads [samples, 1] "
                f"with at least {MIN_SAMPLES} samples.",
                "encoder_prompt",
            )
        if len(samples) > self.max_num_samples:
            raise RequestError(
                f"'input_features' has {len(samples)} samples, and the encoder reads at most "
                f"{self.max_num_samples}; divide the sound.",
                "encoder_prompt",
            )
        return num_tokens, num_tokens

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(data["input_features"][:, 0].astype(np.float32))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(np.zeros(MIN_SAMPLES + _SAMPLES_PER_TOKEN * (num_tokens - 1), np.float32))

    def _item(self, samples: NDArray[np.float32]) -> EncoderItem:
        _, num_frames, _, num_tokens = lengths(len(samples))
        frames = np.lib.stride_tricks.sliding_window_view(samples, TAPS[0])[:: STRIDES[0]]
        return EncoderItem(
            num_tokens,
            (np.array([num_tokens]),),
            numbers={"frames": np.ascontiguousarray(frames)},
            positions=np.arange(num_tokens),
            size=num_frames,
        )

    @property
    def ones(self) -> Ones:
        """Weight of the norm of all numbers of the longest item."""
        return Ones(lengths(self.max_num_samples)[1] * self.norm.size)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the convolutions and the norm."""
        yield from self.first.weights(names.of("first"))
        yield from self.norm.weights(names.of("norm"))
        yield from self.second.weights(names.of("second"))
        yield from self.third.weights(names.of("third"))

    def build(self, parts: Parts) -> WaveInput:
        """Implement `InputSpec`."""
        from octavo.layers.wave import WaveInput

        return WaveInput(
            parts.ops,
            self.first.build(parts.of("first")),
            self.second.build(parts.of("second")),
            self.third.build(parts.of("third")),
            ones(self.ones.size, parts),
            parts.of("norm").tensor("weight"),
            parts.of("norm").tensor("bias"),
            self.norm.eps,
            tuple(zip(TAPS, STRIDES, strict=True)),
        )


def _least(num_tokens: int) -> int:
    """Return the least number of samples with a number of tokens."""
    for taps, stride in zip(reversed(TAPS), reversed(STRIDES), strict=True):
        num_tokens = (num_tokens - 1) * stride + taps
    return num_tokens


MIN_SAMPLES = _least(1)
"""Samples of the shortest sound."""
_SAMPLES_PER_TOKEN = _least(2) - MIN_SAMPLES
