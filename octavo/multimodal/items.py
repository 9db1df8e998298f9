"""Items of prompts, such as pictures, as encoders read them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from octavo.media.content import Modality
from octavo.media.process import Array
from octavo.messages import EMBEDS, MultiModalFeatureSpec, PlaceholderRange, TensorData
from octavo.multimodal.processors.base import Place


@dataclass(frozen=True)
class Part:
    """Part of an item that the encoder reads alone: a whole picture, or a window of a sound."""

    place: Place
    fields: dict[str, TensorData]
    """Input of the encoder, with transformers' names."""
    digest: str
    """Digest of `fields`, and of the place in the positions of a video; equal parts have the same
    one, whatever their files."""

    def beside(self) -> Part:
        """Return the part in a prompt that also has items of another modality.

        Its input has another array: `beside`, int64 [1], 1. Rows that a caller gives stay as they
        are.
        """
        if EMBEDS in self.fields:
            return self
        mark = TensorData("int64", (1,), np.ones(1, np.int64).tobytes())
        digest = hashlib.sha256(f"beside {self.digest}".encode()).hexdigest()
        return Part(self.place, {**self.fields, "beside": mark}, digest)

    def feature(
        self, modality: Modality, position: PlaceholderRange, identifier: str
    ) -> MultiModalFeatureSpec:
        """Return the message for the engine.

        Args:
            modality: modality of the item.
            position: tokens of the prompt.
            identifier: name of the content.
        """
        place = self.place
        return MultiModalFeatureSpec(
            modality,
            identifier,
            position,
            self.fields,
            place.num_encoder_tokens,
            place.grid,
            place.follows,
            place.time,
        )


@dataclass(frozen=True)
class Item:
    """Item that one placeholder of a prompt stands for."""

    modality: Modality
    parts: tuple[Part, ...]
    """Parts in the order of the prompt."""

    @property
    def num_embeds(self) -> int:
        """Number of rows of the encoder."""
        return sum(part.place.num_embeds for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoder's input."""
        return sum(len(tensor.data) for part in self.parts for tensor in part.fields.values())


def make_part(place: Place, fields: Mapping[str, Array]) -> Part:
    """Return a part from its place and the encoder's input."""
    return make_part_of_data(
        place,
        {
            name: TensorData(array.dtype.name, array.shape, array.tobytes())
            for name, array in fields.items()
        },
    )


def make_part_of_data(place: Place, data: dict[str, TensorData]) -> Part:
    """Return a part from its place and the data of the message."""
    digest = hashlib.sha256(b"octavo-item")
    for name, tensor in data.items():
        digest.update(msgspec.msgpack.encode((name, tensor.dtype, tensor.shape)))
        digest.update(tensor.data)
    digest.update(msgspec.msgpack.encode((place.follows, place.time)))
    if EMBEDS in data and place.grid is not None:  # other inputs have their grid
        digest.update(msgspec.msgpack.encode(place.grid))
    return Part(place, data, digest.hexdigest())
