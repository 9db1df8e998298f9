"""Jobs of the helper processes for pictures; see `octavo/media/process.py`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.media.images import decode_image
from octavo.media.process import Array
from octavo.multimodal.pixels import Image
from octavo.multimodal.processors import fallback
from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.registry import make_processor


def prepare(settings: str) -> None:
    """Import transformers, and all that its processor needs for a picture.

    An error is not raised here: each job has the same one.
    """
    with contextlib.suppress(OctavoError):
        _processor(fallback.NAME, settings).process(np.zeros((64, 64, 3), np.uint8))


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
        return _process(kind, settings, decode_image(bytes(files[0])))
    except RequestError as error:
        raise type(error)(f"{name}: {error.message}") from None


def process_pixels(arguments: Any, files: list[memoryview]) -> tuple[Any, Sequence[Array]]:
    """Make the encoder's input of pixels.

    Args:
        arguments: kind and settings (as JSON) of the processor, height and width of the picture.
        files: the pixels, uint8 [height, width, 3].

    Returns:
        As for `process`.
    """
    kind, settings, height, width = arguments
    image = np.frombuffer(files[0], np.uint8).reshape(height, width, 3)
    return _process(kind, settings, image)


def _process(kind: str, settings: str, image: Image) -> tuple[Any, Sequence[Array]]:
    fields = _processor(kind, settings).process(image)
    return [*image.shape[:2], *fields], list(fields.values())


def decode(arguments: Any, files: list[memoryview]) -> tuple[Any, Sequence[Array]]:
    """Decode a picture to pixels: uint8 [height, width, 3]. `arguments` is the file's name."""
    try:
        return None, [decode_image(bytes(files[0]))]
    except RequestError as error:
        raise type(error)(f"{arguments}: {error.message}") from None


JOBS = {"process": process, "process_pixels": process_pixels, "decode": decode}
