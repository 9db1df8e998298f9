"""Specification of the first part of an encoder of sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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

    The item's array is `input_features`, float32 [2 * tokens, frame_size]. A further frame is the
    one after the last token. Both convolutions have three taps and zeros beyond the ends; the
    second has a stride of 2.
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
    whole: bool = True
    """True if each item has a token at every position; False: items may be shorter."""
    averages: int = 1
    """Number of tokens of which a row is the mean; a rest of the tokens has no row."""
    group: int = 1
    """Number of tokens that are joined to one row."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        frames = data["input_features"]
        shape = 2 * self.num_positions, self.frame_size
        if self.whole and frames.shape != shape:
            raise RequestError(
                f"'input_features' has the shape {frames.shape}, and the encoder reads {shape}; "
                "pad the sound with silence.",
                "encoder_prompt",
            )
        tokens = len(frames) // 2
        if frames.ndim != 2 or frames.shape[1] != self.frame_size or tokens < self.averages:
            raise RequestError(
                f"'input_features' has the shape {frames.shape}; the encoder reads at least "
                f"{2 * self.averages} frames of {self.frame_size} numbers."
            )
        return tokens, tokens // (self.averages * self.group)

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        frames = data["input_features"]
        return self._item(len(frames) // 2, frames.astype(np.float32))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(num_tokens, np.zeros((2 * num_tokens, self.frame_size), np.float32))

    def _item(self, num_tokens: int, frames: NDArray[np.float32]) -> EncoderItem:
        padded = np.pad(frames, ((1, 1 - len(frames) % 2), (0, 0)))
        around = np.concatenate([padded[:-2], padded[1:-1], padded[2:]], 1)
        tokens = np.arange(num_tokens)
        inside = np.minimum(tokens, 1)[:, None].astype(np.float32)
        arrays: dict[str, NDArray[Any]] = {}
        indices: dict[str, NDArray[Any]] = {"before": np.maximum(tokens - 1, 0)}
        num_rows = num_tokens // (self.averages * self.group)
        if self.averages > 1:
            averaged = tokens[: num_rows * self.averages].reshape(-1, self.averages)
            indices["averaged_tokens"] = averaged.astype(np.int32)
            arrays["shares"] = np.full(averaged.shape, 1 / self.averages, np.float32)
        return EncoderItem(
            num_rows,
            (np.array([num_tokens]),),
            numbers={"frames": around, "inside": inside, "ones": np.ones_like(inside)},
            arrays=arrays,
            indices=indices,
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
