"""Reading of a model's pictures: files to encoder inputs, in helper processes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from octavo.media.process import NUM_PROCESSES, Limits, MediaProcesses, Result
from octavo.multimodal.items import Item, make_part
from octavo.multimodal.pixels import Image
from octavo.multimodal.processors import fallback
from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.registry import make_processor
from octavo.system.limited_process import Buffer

LIMITS = Limits(seconds=20.0, nbytes=2**31, output_nbytes=2**29)
"""Limits of one picture: processor time, memory of the process, and the encoder's input."""
FALLBACK_LIMITS = dataclasses.replace(LIMITS, nbytes=2**32)
"""Limits with transformers' processor, which imports torch: its idle process has 1 GiB."""


class PictureReader:
    """Reader of the pictures of one model.

    Args:
        kind: name of the model's processor.
        settings: its settings; both are from `read_processor`.
        num_processes: most helper processes; one with transformers' processor.

    Raises:
        ModelError: a setting has an impossible value.
    """

    def __init__(
        self, kind: str, settings: Mapping[str, Any], num_processes: int = NUM_PROCESSES
    ) -> None:
        self.processor = make_processor(kind, settings)
        self._kind = kind
        module, limits, prepared = "octavo.multimodal.image_jobs", LIMITS, None
        if kind == fallback.NAME:
            num_processes, limits, prepared = 1, FALLBACK_LIMITS, json.dumps(dict(settings))
        self._processes = MediaProcesses(module, "vision", limits, num_processes, prepared)

    @property
    def num_processes(self) -> int:
        """Most helper processes."""
        return self._processes.num_processes

    def read(
        self, file: Buffer, param: str, mm_processor_kwargs: Mapping[str, Any] | None = None
    ) -> Future[Item]:
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

        make = functools.partial(_make_item, processor)
        return self._processes.submit(
            "process", [file], [self._kind, settings, param], param=param, make=make
        )

    def read_pixels(self, processor: ImageProcessor, pixels: Image, param: str) -> Future[Item]:
        """Start to process pixels, uint8 [height, width, 3]; see `read` for errors.

        Args:
            processor: the model's, or one with other settings.
            pixels: the picture.
            param: field of the request that has the picture, for errors.
        """
        settings = json.dumps(processor.settings.fields, sort_keys=True)
        height, width = pixels.shape[:2]
        return self._processes.submit(
            "process_pixels",
            [pixels.tobytes()],
            [self._kind, settings, height, width],
            param=param,
            make=functools.partial(_make_item, processor),
        )

    def close(self) -> None:
        """End the helper processes."""
        self._processes.close()


def _make_item(processor: ImageProcessor, result: Result) -> Item:
    (height, width, *names), arrays = result
    fields = dict(zip(names, arrays, strict=True))
    return Item("image", (make_part(processor.place(height, width), fields),))
