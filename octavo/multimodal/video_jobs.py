"""Jobs of the helper processes for videos; see `octavo/media/process.py`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import octavo.media.images  # noqa: F401 (Pillow's parts, which cannot be imported later)
from octavo.errors import RequestError
from octavo.media.process import Array
from octavo.media.videos import read_frames, read_index
from octavo.multimodal.processors.registry import make_video_processor
from octavo.multimodal.processors.video import VideoProcessor


@functools.lru_cache(maxsize=64)
def _processor(kind: str, settings: str) -> VideoProcessor:
    return make_video_processor(kind, json.loads(settings))


def process(arguments: Any, files: list[memoryview]) -> tuple[Any, Sequence[Array]]:
    """Decode chosen frames of a video and make the encoder's inputs.

    Args:
        arguments: kind and settings (as JSON) of the processor, the name of the file, and the most
            bytes of the encoder's inputs.
        files: the video's file.

    Returns:
        Indices of the chosen frames, number of all, frames a second, height, width, the names of
        the arrays of a part, and the arrays of all parts.
    """
    kind, settings, name, max_nbytes = arguments
    try:
        return _process(_processor(kind, settings), files[0], max_nbytes)
    except RequestError as error:
        raise type(error)(f"{name}: {error.message}") from None


def _process(
    processor: VideoProcessor, file: memoryview, max_nbytes: int
) -> tuple[Any, Sequence[Array]]:
    index = read_index(file)
    chosen = processor.choose(index.count, index.fps)
    images = read_frames(file, index, chosen)
    first = next(images)
    size = first.shape[0], first.shape[1]
    frames = processor.frames(chosen, index.count, index.fps, size)
    processor.places(frames)  # it checks the size
    arrays: list[Array] = []
    names: list[str] = []
    nbytes = 0
    for fields in processor.process(frames, itertools.chain([first], images)):
        names = list(fields)
        arrays += fields.values()
        nbytes += sum(array.nbytes for array in fields.values())
        if nbytes > max_nbytes:
            raise RequestError(
                f"its {len(chosen)} frames have more than {max_nbytes} bytes for the model; ask "
                "for fewer or smaller ones with num_frames, fps or max_pixels in "
                "mm_processor_kwargs."
            )
    return [chosen, index.count, index.fps, *size, *names], arrays


JOBS = {"process": process}


_GIF = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff!\xf9\4\1\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\1D\0;"
"""Smallest picture."""


def _import_all() -> None:
    """Decode a GIF and a wrong file, so that the libraries import now all that they need later."""
    file = memoryview(_GIF)
    list(read_frames(file, read_index(file), [0]))
    with contextlib.suppress(RequestError):
        read_index(memoryview(b"\0\0\0\x18ftypmp42" + bytes(64)))


_import_all()
