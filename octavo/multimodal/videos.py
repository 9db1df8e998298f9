"""Reading of a model's videos: files to encoder inputs, in helper processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from octavo.media.process import NUM_PROCESSES, Array, Limits, MediaProcesses, Result
from octavo.multimodal.items import Item, make_part
from octavo.multimodal.processors.registry import make_video_processor
from octavo.multimodal.processors.video import Frames, VideoProcessor
from octavo.system.limited_process import Buffer

_MAX_NBYTES = 2**29
LIMITS = Limits(seconds=60.0, nbytes=3 * 2**30, output_nbytes=_MAX_NBYTES + 2**20)
"""Limits of one video: processor time, memory of the process, and the encoder's inputs."""


class VideoReader:
    """Reader of the videos of one model.

    Args:
        kind: name of the model's processor.
        settings: its settings; both are from `read_video_processor`.
        num_processes: most helper processes.
    """

    def __init__(
        self, kind: str, settings: Mapping[str, Any], num_processes: int = NUM_PROCESSES
    ) -> None:
        self.processor = make_video_processor(kind, settings)
        self._kind = kind
        self._processes = MediaProcesses(
            "octavo.multimodal.video_jobs", "video", LIMITS, num_processes
        )

    @property
    def num_processes(self) -> int:
        """Most helper processes."""
        return self._processes.num_processes

    def read(
        self, file: Buffer, param: str, mm_processor_kwargs: Mapping[str, Any] | None = None
    ) -> Future[Item]:
        """Start to read a video.

        Args:
            file: MP4, MOV, WebM, Matroska, AVI or GIF.
            param: field of the request that has the video, for errors.
            mm_processor_kwargs: other values of the processor's settings.

        Raises:
            RequestError: mm_processor_kwargs is wrong.

        The future's errors:
            RequestError: the video cannot be read within the limits.
            UnsupportedError: its codec is not supported, or PyAV or Pillow is not installed.
        """
        processor = self.processor.changed(mm_processor_kwargs or {})
        settings = json.dumps(processor.settings.fields, sort_keys=True)

        def make(result: Result) -> Item:
            (chosen, total, fps, height, width, *names), arrays = result
            frames = processor.frames(chosen, total, fps, (height, width))
            size = len(names)
            parts = [
                dict(zip(names, arrays[i : i + size], strict=True))
                for i in range(0, len(arrays), size)
            ]
            return make_item(processor, frames, parts)

        return self._processes.submit(
            "process",
            [file],
            [self._kind, settings, param, _MAX_NBYTES],
            param=param,
            make=make,
        )

    def close(self) -> None:
        """End the helper processes."""
        self._processes.close()


def make_item(
    processor: VideoProcessor, frames: Frames, parts: Iterable[Mapping[str, Array]]
) -> Item:
    """Return a video from the inputs of the encoder for its parts."""
    places = processor.places(frames)
    made = (make_part(place, fields) for place, fields in zip(places, parts, strict=True))
    return Item("video", tuple(made))
