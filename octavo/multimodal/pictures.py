"""Reading of a model's pictures: files to encoder inputs, in helper processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from octavo.media.process import Limits, MediaProcesses, Result
from octavo.multimodal.items import Item, make_part
from octavo.multimodal.processors.registry import make_processor
from octavo.system.limited_process import Buffer

LIMITS = Limits(seconds=20.0, nbytes=2**31, output_nbytes=2**29)
"""Limits of one picture: processor time, memory of the process, and the encoder's input."""


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

        def make(result: Result) -> Item:
            (height, width, *names), arrays = result
            fields = dict(zip(names, arrays, strict=True))
            return Item("image", (make_part(processor.place(height, width), fields),))

        return self._processes.submit(
            "process", [file], [self._kind, settings, param], param=param, make=make
        )

    def close(self) -> None:
        """End the helper processes."""
        self._processes.close()
