"""Specification of the first part of an encoder of sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.checkpoints.base import Source
from octavo.errors import RequestError
from octavo.models.blocks.encoder_input import Arrays, EncoderItem
from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.frames import FramesInput
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class FramesInputSpec:
    """Two convolutions over the frames of a sound (Whisper, arXiv:2212.04356, section 2.2).

    The item's array is `input_features`, float32 [2 * positions, frame_size]. Both convolutions
    have three taps and zeros beyond the ends; the second has a stride of 2.
    """

    first: LinearSpec
    second: LinearSpec
    """The convolutions, with the layout "taps"."""
    frame_size: int
    """Numbers of a frame."""
    hidden_size: int
    positions: str
    """Tensor of the checkpoint with the vectors of positions."""
    num_positions: int

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        frames = data["input_features"]
        shape = 2 * self.num_positions, self.frame_size
        if frames.shape != shape:
            raise RequestError(
                f"'input_features' has the shape {frames.shape}, and the encoder reads {shape}; "
                "pad the sound with silence.",
                "encoder_prompt",
            )
        return self.num_positions, self.num_positions

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        return self.largest(self.num_positions, data["input_features"])

    def largest(self, num_tokens: int, frames: np.ndarray | None = None) -> EncoderItem:
        """Implement `InputSpec`; `frames` are the numbers, zeros by default."""
        if frames is None:
            frames = np.zeros((2 * num_tokens, self.frame_size), np.float32)
        padded = np.pad(frames.astype(np.float32), ((1, 1), (0, 0)))
        around = np.concatenate([padded[:-2], padded[1:-1], padded[2:]], 1)
        tokens = np.arange(num_tokens)
        inside = np.minimum(tokens, 1)[:, None].astype(np.float32)
        return EncoderItem(
            num_tokens,
            (np.array([num_tokens]),),
            numbers={"frames": around, "inside": inside, "ones": np.ones_like(inside)},
            indices={"before": np.maximum(tokens - 1, 0)},
            positions=tokens,
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the convolutions and the vectors of positions."""
        yield from self.first.weights(names.of("first"))
        yield from self.second.weights(names.of("second"))
        shape = self.num_positions, self.hidden_size
        source = Source(self.positions, shape)
        yield Weight(f"{names.own}positions", "embedding", shape, (source,))

    def build(self, parts: Parts) -> FramesInput:
        """Implement `InputSpec`."""
        from octavo.layers.frames import FramesInput

        return FramesInput(
            parts.ops,
            self.first.build(parts.of("first")),
            self.second.build(parts.of("second")),
            parts.tensor("positions"),
        )
