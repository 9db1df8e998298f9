"""Specification of the first part of Phi-4's encoder of sounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.models.blocks.encoder_input import Arrays, EncoderItem
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import StandardSpec
from octavo.models.blocks.spectrogram import count_frames, halved
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.nemo import NemoInput
    from octavo.models.blocks.base import Parts

REDUCTION = 8
"""Frames of a token: each of three convolutions has a stride of 2."""
SEGMENT = 500
"""Most tokens of a segment, which the layers compute alone."""
_CHUNK = 16
"""Tokens that are computed at once, which bounds the memory."""
_TIMES = 4 * _CHUNK + 3, 2 * _CHUNK + 1
"""Results of the first and of the second convolution in time that the tokens of a chunk see."""
_FRAMES = 2 * _TIMES[0] + 1
"""Frames that they see."""


def num_tokens(num_frames: int) -> int:
    """Return the number of tokens of a sound."""
    return -(-num_frames // REDUCTION)


def with_filling(tokens: int) -> int:
    """Return the number of tokens of the segments of a sound: several are filled with zeros."""
    return tokens if tokens <= SEGMENT else -(-tokens // SEGMENT) * SEGMENT


@dataclass(frozen=True)
class SeparableConv:
    """3 x 3 convolution of each channel with its own weights, and a projection of the channels."""

    module: str
    """Module of the first part in the checkpoint."""
    channels: int
    mix: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of both parts."""
        size = self.channels
        taps = Source(f"{self.module}.weight", (size, 1, 3, 3), "flat")
        yield Weight(f"{names.own}taps", "vector", (9 * size,), (taps,))
        bias = Source(f"{self.module}.bias", (size,))
        yield Weight(f"{names.own}bias", "vector", (size,), (bias,))
        yield from self.mix.weights(names.of("mix"))


@dataclass(frozen=True)
class NemoInputSpec:
    """Three 3 x 3 convolutions with a stride of 2 and ReLU, and a projection (NeMo).

    The item's array is `input_features`, float32 [frames, bands], and for a sound beside pictures
    `beside`, see `Part.beside`. Numbers of a band are standard scores. Zeros lie beyond the edges.
    A sound of more than `SEGMENT` tokens is divided into segments, the last of which is filled with
    tokens of zeros, as in transformers.
    """

    standard: StandardSpec
    first: LinearSpec
    """Layout "taps"; a tap is a time and a band."""
    others: tuple[SeparableConv, SeparableConv]
    project: LinearSpec
    bands: int
    hidden_size: int

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        count = num_tokens(count_frames(data, self.bands))
        return with_filling(count), count

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        is_beside = "beside" in data and bool(data["beside"].any())
        return self._item(data["input_features"].astype(np.float32), is_beside=is_beside)

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self._item(np.zeros((REDUCTION * num_tokens, self.bands), np.float32))

    def _item(self, frames: NDArray[np.float32], *, is_beside: bool = False) -> EncoderItem:
        count = num_tokens(len(frames))
        total = with_filling(count)
        chunks = -(-total // _CHUNK)
        # Token t sees the results 2 t - 1 to 2 t + 1 of the second convolution, and so on. The last
        # row of each chunk stays zero: it stands for what lies beyond the first and the last band.
        starts = np.arange(chunks)[:, None] * _CHUNK
        times = 8 * starts - 7 + np.arange(_FRAMES + 1)
        is_frame = (times >= 0) & (times < len(frames)) & (np.arange(_FRAMES + 1) < _FRAMES)
        found = frames[np.clip(times, 0, len(frames) - 1)]
        masks, length = [], len(frames)
        bands = self.bands
        for factor, before, size in ((4, 3, _TIMES[0]), (2, 1, _TIMES[1])):
            length, bands = halved(length), halved(bands)
            times = factor * starts - before + np.arange(size)
            mask = np.zeros((chunks, size * bands + 1, 1), np.float32)
            mask[:, :-1, 0] = np.repeat((times >= 0) & (times < length), bands, 1)
            masks.append(mask.reshape(-1, 1))
        segments = np.full(-(-total // SEGMENT), SEGMENT) if total > SEGMENT else np.array([total])
        return EncoderItem(
            count,
            (segments,),
            numbers={
                "frames": found.reshape(-1, self.bands),
                "frame_mask": is_frame.reshape(-1, 1).astype(np.float32),
                "first_mask": masks[0],
                "second_mask": masks[1],
                "alone": np.full((count, 1), not is_beside, np.float32),
                "beside": np.full((count, 1), is_beside, np.float32),
                "token_mask": (np.arange(total) < count).astype(np.float32)[:, None],
            },
            arrays={
                "no_source": np.full(len(segments), -1, np.int32),
                "no_slots": np.full(total, -1, np.int32),
            },
            indices={"output_tokens": np.arange(count)},
            size=total,
        )

    def taps(self) -> list[NDArray[np.int64]]:
        """Return the inputs of each convolution in a chunk: int64 [results, 9].

        Inputs are in order of time, then of band; the one after them is zero. For the first
        convolution they are numbers, for the others rows of channels.
        """
        taps, bands = [], self.bands
        for times in (_FRAMES, *_TIMES):
            padded = np.full((times, bands + 3), times * bands)
            padded[:, 1 : bands + 1] = np.arange(times * bands).reshape(times, bands)
            time, band = np.ogrid[: times // 2, : halved(bands)]
            found = [padded[2 * time + i, 2 * band + j] for i in range(3) for j in range(3)]
            rows = np.stack(found, -1).reshape(-1, 9)
            nothing = np.full((1, 9), times * bands)
            taps.append(np.concatenate([rows, nothing]) if times != _TIMES[1] else rows)
            bands = halved(bands)
        return taps

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.standard.weights(names.of("standard"))
        yield from self.first.weights(names.of("first"))
        for i, convolution in enumerate(self.others):
            yield from convolution.weights(names.of(f"others.{i}"))
        yield from self.project.weights(names.of("project"))

    def build(self, parts: Parts) -> NemoInput:
        """Implement `InputSpec`."""
        from octavo.layers.nemo import NemoInput, Separable

        ops, channels = parts.ops, self.others[0].channels
        taps = self.taps()
        others = []
        for i, convolution in enumerate(self.others):
            own = parts.of(f"others.{i}")
            results = len(taps[i + 1])
            others.append(
                Separable(
                    ops,
                    own.tensor("taps"),
                    own.tensor("bias"),
                    convolution.mix.build(own.of("mix")),
                    ops.to_device(taps[i + 1].ravel()),
                    ops.to_device(np.arange(9 * results, dtype=np.int32).reshape(-1, 9)),
                )
            )
        by_tap = np.arange(9 * channels).reshape(channels, 9).T.ravel()
        return NemoInput(
            ops,
            self.standard.build(parts.of("standard")),
            self.first.build(parts.of("first")),
            others,
            self.project.build(parts.of("project")),
            ops.to_device(taps[0].ravel()),
            ops.to_device(by_tap),
            _FRAMES + 1,
            _CHUNK,
            self.hidden_size,
        )
