"""Processors of videos: frames become parts of an item, which an encoder reads one by one.

Sources: `Qwen2VLVideoProcessor`, `Qwen3VLVideoProcessor`, `SmolVLMVideoProcessor`,
`LlavaOnevisionVideoProcessor`, `InternVLVideoProcessor`, `Gemma4VideoProcessor` and the processors
of these models in transformers. Frames are scaled by Pillow, as pictures are, where transformers
uses torchvision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import RequestError
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import ImageProcessor, ModelFiles, Place, Processor, integers
from octavo.multimodal.processors.gemma4 import Gemma4Processor, Gemma4UnifiedProcessor
from octavo.multimodal.processors.idefics3 import Idefics3Processor
from octavo.multimodal.processors.internvl import InternVLProcessor
from octavo.multimodal.processors.llava_next import OneVisionProcessor
from octavo.multimodal.processors.qwen2_vl import Qwen2VLProcessor, with_size

MAX_FRAMES = 768
"""Most frames of a video that a model reads."""
ARRAY_FPS = 24.0
"""Frames a second of a video that a caller gives as an array without another number."""
_MAX_FPS = 1000.0


@dataclass(frozen=True)
class Frames:
    """Frames that were chosen of a video."""

    height: int
    width: int
    times: tuple[float, ...]
    """Time of each frame in seconds."""
    fps: float
    """Chosen frames a second."""
    seconds: float
    """Length of the video."""


class VideoProcessor(Processor, ABC):
    """Processor of videos.

    Args:
        settings: those of the processor of pictures, changed for frames; `num_frames`, the most
            frames of a video (-1: all), and `fps`, the most frames a second, or None.

    Raises:
        ModelError: a setting has an impossible value.
    """

    images: ClassVar[type[ImageProcessor]]
    """Processor of frames."""

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self.image = self.images(settings)
        self._num_frames = settings.integer("num_frames", least=-1, most=MAX_FRAMES)
        self._fps = None
        if settings.has("fps"):
            self._fps = settings.positive("fps")
            if self._fps > _MAX_FPS:
                raise settings.error("fps", f"it must be at most {_MAX_FPS:g}")
        if not self._num_frames:
            raise settings.error("num_frames", "it must be positive, or -1 for all")

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings of a model, from its files.

        Raises:
            ModelError: a file lacks a value, or has an impossible one.
        """
        video = files.video.fields
        of_pictures = replace(
            files,
            preprocessor=ConfigJson({**files.preprocessor.fields, **video}, "video_preprocessor"),
        )
        settings = cls.images.read_settings(of_pictures)
        return {**settings, "num_frames": 32, "fps": None, "placeholder": "<video>"}

    def choose(self, total: int, fps: float) -> list[int]:
        """Return the indices of the frames to read, as vLLM chooses them.

        Args:
            total: number of frames of a video.
            fps: its frames a second.

        Raises:
            RequestError: they are too many.
        """
        count = total if self._num_frames < 0 else min(self._num_frames, total)
        if self._fps is not None:
            count = max(1, min(count, math.floor(total / fps * self._fps)))
        if count > MAX_FRAMES:
            raise RequestError(
                f"it has {count} frames, and at most {MAX_FRAMES} are read; set num_frames or fps "
                "in mm_processor_kwargs."
            )
        return [int(i) for i in np.linspace(0, total - 1, count, dtype=int)]

    def frames(self, indices: list[int], total: int, fps: float, size: tuple[int, int]) -> Frames:
        """Return a description of chosen frames.

        Args:
            indices: what `choose` returned.
            total: number of frames of the video.
            fps: its frames a second.
            size: height and width.
        """
        times = tuple(i / fps for i in indices)
        return Frames(*size, times, len(indices) / total * fps, total / fps)

    @abstractmethod
    def places(self, frames: Frames) -> list[Place]:
        """Return the places of the parts of a video.

        Raises:
            RequestError: the model reads no video of this size.
        """

    @abstractmethod
    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the inputs of the encoder for each part, with transformers' names.

        Args:
            frames: description of the frames.
            images: the frames, all of one size.
        """


class QwenVideoProcessor(VideoProcessor):
    """Videos of Qwen2-VL and Qwen2.5-VL, whose successive frames share patches.

    A part is as many frames as a patch has; the last frame fills the last part. Parts have the
    positions of one grid: the time of a part is its index, or in Qwen2.5-VL its time.
    """

    images = Qwen2VLProcessor
    request_settings = ("num_frames", "fps", *Qwen2VLProcessor.request_settings)
    limits: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 128 * 28 * 28,
        "longest_edge": 768 * 28 * 28,
    }
    """Least and most pixels of a frame, for models that name none for videos."""

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self._patch = settings.integer("patch_size", most=1024)
        self._merge = settings.integer("merge_size", most=64)
        self._per_patch = settings.integer("temporal_patch_size", most=64)
        self._rate = settings.get("tokens_per_second")

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Implement `Processor`."""
        return super().changed(with_size(given))

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; without a file for videos the limits of pixels are the class's."""
        settings = super().read_settings(files)
        if not files.video.fields:
            settings |= {"size": dict(cls.limits), "min_pixels": None, "max_pixels": None}
        rate = None
        if files.config.get("model_type") == "qwen2_5_vl":
            vision = files.config.section("vision_config")
            rate = vision.positive("tokens_per_second", 4.0)
        token = "<|video_pad|>"
        return {**settings, "tokens_per_second": rate, "placeholder": token, "embed_token": token}

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`."""
        rows, columns = self._grid(frames)
        grid = 1, rows // self._merge, columns // self._merge
        count, num_rows = -(-len(frames.times) // self._per_patch), grid[1] * grid[2]
        step = np.float32(1)
        if self._rate is not None:
            step = np.float32(self._rate) * np.float32(self._per_patch / frames.fps)
        return [
            Place((num_rows,), rows * columns, grid, i * num_rows, int(np.float32(i) * step))
            for i in range(count)
        ]

    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield `pixel_values` and `image_grid_thw` of each part; see `Qwen2VLProcessor`."""
        rows, columns = self._grid(frames)
        size = rows * self._patch, columns * self._patch
        several: list[NDArray[np.float32]] = []
        left = len(frames.times)
        for image in images:
            left -= 1
            several.append(self.image.levels.of(resize(image, *size, self.image.resample)))
            if not left:
                several += [several[-1]] * (self._per_patch - len(several))
            if len(several) == self._per_patch:
                yield self._patches(np.stack(several), rows, columns)
                several = []

    def _patches(
        self, planes: NDArray[np.float32], rows: int, columns: int
    ) -> dict[str, NDArray[Any]]:
        patch, merge = self._patch, self._merge
        cut = planes.reshape(
            self._per_patch, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        # Square, patch of the square, color, frame, row and column of the patch.
        patches = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
        return {"pixel_values": patches, "image_grid_thw": integers(1, rows, columns)}

    def _grid(self, frames: Frames) -> tuple[int, int]:
        """Return the numbers of patches in a column and in a row of the scaled frames."""
        assert isinstance(self.image, Qwen2VLProcessor)
        return self.image.grid(frames.height, frames.width)


class Qwen3VideoProcessor(QwenVideoProcessor):
    """Videos of Qwen3-VL and Qwen3.5: a text with its time stands before each part."""

    around = ("<|vision_start|>", "<|vision_end|>")
    limits: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 128 * 32 * 32,
        "longest_edge": 768 * 32 * 32,
    }
    """Least and most pixels of all frames together."""

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`; the time of a part is the mean of its first and last one."""
        rows, columns = self._grid(frames)
        grid = 1, rows // self._merge, columns // self._merge
        times = list(frames.times)
        times += times[-1:] * (-len(times) % self._per_patch)
        begins, ends = times[:: self._per_patch], times[self._per_patch - 1 :: self._per_patch]
        texts = [
            f"<{(begin + end) / 2:.1f} seconds><|vision_start|>"
            for begin, end in zip(begins, ends, strict=True)
        ]
        num_rows, num_tokens = grid[1] * grid[2], rows * columns
        return [Place((text, num_rows, "<|vision_end|>"), num_tokens, grid) for text in texts]

    def _grid(self, frames: Frames) -> tuple[int, int]:
        assert isinstance(self.image, Qwen2VLProcessor)
        factor = self._patch * self._merge
        height, width = frames.height, frames.width
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        count = max(len(frames.times), self._per_patch)  # a frame alone is repeated
        return self.image.grid(height, width, count, self._per_patch)


class SmolVideoProcessor(VideoProcessor):
    """Videos of SmolVLM: frames are whole pictures, each after a text with its time."""

    images = Idefics3Processor
    request_settings = ("num_frames", "fps", "size")

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; video_sampling has those of videos."""
        settings = {**super().read_settings(files), "do_image_splitting": False}
        fields = {**files.preprocessor.fields, **files.video.fields}
        sampling = ConfigJson(fields, "preprocessor_config.json").section("video_sampling")
        settings["num_frames"] = sampling.integer("max_frames", default=64)
        settings["fps"] = sampling.positive("fps", 1.0)
        if sampling.has("video_size"):
            settings["size"] = sampling.get("video_size")
        return {**settings, "other_placeholder": "<global-img>"}

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`."""
        place = self.image.place(frames.height, frames.width)
        count, seconds = len(frames.times), int(frames.seconds)
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        before = (
            f"You are provided the following series of {in_words(count)} frames from a {clock} "
            "[H:MM:SS] video.\n"
        )
        found = []
        for i, time in enumerate(frames.times):
            stamp = f"{before}\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"
            first, rows, last = place.pieces
            end = "\n\n" if i == count - 1 else ""
            found.append(replace(place, pieces=(f"{stamp}{first}", rows, f"{last}{end}")))
            before = ""
        return found

    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield `pixel_values` and `tiles` of each frame; see `Idefics3Processor`."""
        return (self.image.process(image) for image in images)


class InternVideoProcessor(VideoProcessor):
    """Videos of InternVL: frames are pictures of one tile, each after its number."""

    images = InternVLProcessor
    request_settings = ("num_frames", "fps")

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings.replaced("crop_to_patches", False))

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`."""
        place = self.image.place(frames.height, frames.width)
        found = []
        for i in range(len(frames.times)):
            first, rows, last = place.pieces
            begin = f"{chr(10) * (i > 0)}Frame{i + 1}: {first}"
            found.append(replace(place, pieces=(begin, rows, last)))
        return found

    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield `pixel_values` of each frame; see `InternVLProcessor`."""
        return (self.image.process(image) for image in images)


class OneVisionVideoProcessor(VideoProcessor):
    """Videos of LLaVA-OneVision: frames of half the height and width, and a vector after all."""

    images = OneVisionProcessor
    request_settings = ("num_frames", "fps")

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings."""
        return {**super().read_settings(files), "embed_token": "<video>"}

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`."""
        assert isinstance(self.image, OneVisionProcessor)
        layout, count = self.image.layout, len(frames.times)
        rows = math.prod(layout.frame_rows)
        return [Place((rows + (i == count - 1),), layout.num_tokens) for i in range(count)]

    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the inputs of each frame.

        Yields:
            `pixel_values`: float32 [1, 3, side, side].
            `ends_video`: int64 [1]: 1 for the last frame.
        """
        assert isinstance(self.image, OneVisionProcessor)
        side = self.image.layout.tiles.size
        for i, image in enumerate(images, 1):
            pixels = self.image.levels.of(resize(image, side, side, self.image.resample))
            yield {
                "pixel_values": pixels[None],
                "ends_video": integers(int(i == len(frames.times))),
            }


class Gemma4VideoProcessor(VideoProcessor):
    """Videos of Gemma 4: frames are pictures with few rows, each after its time."""

    images = Gemma4Processor
    request_settings = ("num_frames", "fps", *Gemma4Processor.request_settings)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; `max_soft_tokens` is that of videos, not that of pictures."""
        most = {"max_soft_tokens": files.video.integer("max_soft_tokens", default=70)}
        count = {"num_frames": files.video.integer("num_frames", default=32, most=MAX_FRAMES)}
        tokens = {"placeholder": "<|video|>", "embed_token": "<|video|>"}
        return {**super().read_settings(files), **most, **count, **tokens}

    def places(self, frames: Frames) -> list[Place]:
        """Implement `VideoProcessor`."""
        place = self.image.place(frames.height, frames.width)
        first, rows, last = place.pieces
        found = []
        for i, time in enumerate(frames.times):
            begin = f"{' ' * (i > 0)}{int(time // 60):02d}:{int(time % 60):02d} {first}"
            found.append(replace(place, pieces=(begin, rows, last)))
        return found

    def process(self, frames: Frames, images: Iterable[Image]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the inputs of each frame; see `Gemma4Processor`."""
        return (self.image.process(image) for image in images)


class Gemma4UnifiedVideoProcessor(Gemma4VideoProcessor):
    """Videos of Gemma 4 12B."""

    images = Gemma4UnifiedProcessor


_UNITS: tuple[str, ...] = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
_UNITS += ("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")
_UNITS += ("eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number from 0 to 999 in English words."""
    hundreds, rest = divmod(number, 100)
    if rest < len(_UNITS):
        words = _UNITS[rest]
    else:
        words = _TENS[rest // 10 - 2] + (f"-{_UNITS[rest % 10]}" if rest % 10 else "")
    if not hundreds:
        return words
    return f"{_UNITS[hundreds]} hundred" + (f" and {words}" if rest else "")


VIDEO_PROCESSORS: Mapping[str, type[VideoProcessor]] = {
    "gemma4": Gemma4VideoProcessor,
    "gemma4_unified": Gemma4UnifiedVideoProcessor,
    "internvl": InternVideoProcessor,
    "llava_onevision": OneVisionVideoProcessor,
    "qwen2_vl": QwenVideoProcessor,
    "qwen2_5_vl": QwenVideoProcessor,
    "qwen3_vl": Qwen3VideoProcessor,
    "qwen3_vl_moe": Qwen3VideoProcessor,
    "qwen3_5": Qwen3VideoProcessor,
    "qwen3_5_moe": Qwen3VideoProcessor,
    "smolvlm": SmolVideoProcessor,
}
"""model_type -> processor."""
