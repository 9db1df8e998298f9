"""Jobs of the helper processes for pictures; see `octavo/media/process.py`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.media.images import decode_image
from octavo.media.process import Array
from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.registry import make_processor


@functools.lru_cache(maxsize=64)
def _processor(kind: str, settings: str) -> ImageProcessor:
    return make_processor(kind, json.loads(settings))


def process(arguments: Any, files: list[memoryview]) -> tuple[Any, Sequence[Array]]:
    """Decode a picture and make the encoder's input.

    Args:
        arguments: kind and settings (as JSON) of the processor, and the name of the file.
        files: the picture's file.

    Returns:
        Height and width of the picture, the names of the arrays, and the arrays.
    """
    kind, settings, name = arguments
    try:
        image = decode_image(bytes(files[0]))
        fields = _processor(kind, settings).process(image)
    except RequestError as error:
        raise type(error)(f"{name}: {error.message}") from None
    return [*image.shape[:2], *fields], list(fields.values())


def decode(arguments: Any, files: list[memoryview]) -> tuple[Any, Sequence[Array]]:
    """Decode a picture to pixels: uint8 [height, width, 3]. `arguments` is the file's name."""
    try:
        return None, [decode_image(bytes(files[0]))]
    except RequestError as error:
        raise type(error)(f"{arguments}: {error.message}") from None


JOBS = {"process": process, "decode": decode}
