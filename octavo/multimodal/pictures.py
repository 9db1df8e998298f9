"""Reading of a model's pictures: files to encoder inputs, in helper processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.media.process import Array, Limits, MediaProcesses, Result
from octavo.messages import MultiModalFeatureSpec, PlaceholderRange, TensorData
from octavo.multimodal.processors.base import Place
from octavo.multimodal.processors.registry import make_processor
from octavo.system.limited_process import Buffer

LIMITS = Limits(seconds=20.0, nbytes=2**31, output_nbytes=2**29)
"""Limits of one picture: processor time, memory of the process, and the encoder's input."""


@dataclass(frozen=True)
class Picture:
    """Picture as an encoder reads it."""

    place: Place
    fields: dict[str, TensorData]
    """Input of the encoder, with transformers' names."""
    digest: str
    """Digest of `fields`; equal pictures have the same one, whatever their files."""

    @property
    def nbytes(self) -> int:
        """Bytes of `fields`."""
        return sum(len(tensor.data) for tensor in self.fields.values())

    def feature(
        self, position: PlaceholderRange, identifier: str | None = None
    ) -> MultiModalFeatureSpec:
        """Return the message for the engine.

        Args:
            position: tokens of the prompt.
            identifier: name of the content instead of `digest`.
        """
        return MultiModalFeatureSpec(
            "image",
            identifier or self.digest,
            position,
            self.fields,
            self.place.num_encoder_tokens,
            self.place.grid,
        )


class PictureReader:
    """Reader of the pictures of one model.

    Args:
        kind: name of the model's processor.
        settings: its settings; both are from `read_processor`.
        num_processes: most helper processes.

    Raises:
        ModelError: a setting has an impossible value.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], num_processes: int = 2) -> None:
        self.processor = make_processor(kind, settings)
        self._kind = kind
        self._processes = MediaProcesses(
            "octavo.multimodal.image_jobs", "vision", LIMITS, num_processes
        )

    def read(
        self, file: Buffer, param: str, mm_processor_kwargs: Mapping[str, Any] | None = None
    ) -> Future[Picture]:
        """Start to read a picture.

        Args:
            file: PNG, JPEG, WebP, GIF, BMP or TIFF.
            param: field of the request that has the picture, for errors.
            mm_processor_kwargs: other values of the processor's settings.

        Raises:
            RequestError: mm_processor_kwargs is wrong.

        The future's errors:
            RequestError: the picture cannot be read within the limits.
            UnsupportedError: its format is not supported, or Pillow is not installed.
        """
        processor = self.processor.changed(mm_processor_kwargs or {})
        settings = json.dumps(processor.settings.fields, sort_keys=True)

        def make(result: Result) -> Picture:
            (height, width, *names), arrays = result
            fields = dict(zip(names, arrays, strict=True))
            return make_picture(processor.place(height, width), fields)

        return self._processes.submit(
            "process", [file], [self._kind, settings, param], param=param, make=make
        )

    def close(self) -> None:
        """End the helper processes."""
        self._processes.close()


def make_picture(place: Place, fields: Mapping[str, Array]) -> Picture:
    """Return a picture from its place and the encoder's input."""
    data = {
        name: TensorData(array.dtype.name, array.shape, array.tobytes())
        for name, array in fields.items()
    }
    digest = hashlib.sha256(b"octavo-picture")
    for name, tensor in data.items():
        digest.update(msgspec.msgpack.encode((name, tensor.dtype, tensor.shape)))
        digest.update(tensor.data)
    return Picture(place, data, digest.hexdigest())
