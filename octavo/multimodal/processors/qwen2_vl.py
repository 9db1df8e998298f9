"""Pictures of nearly their own size, cut into patches: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Source: `Qwen2VLImageProcessorPil` and `Qwen2VLProcessor` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import RequestError
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import (
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    ModelFiles,
    Place,
    integers,
)

MAX_RATIO = 200
"""Maximum ratio of the sides of a picture."""
_MOST_PIXELS = 2**26


def with_size(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's settings; its `size` precedes the older names in the model's files."""
    if given.get("size") is None:
        return given
    return {"min_pixels": None, "max_pixels": None, **given}


class Qwen2VLProcessor(ImageProcessor):
    """Processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    defaults = {  # noqa: RUF012
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": None,
        "max_pixels": None,
    }
    request_settings = ("min_pixels", "max_pixels", "size")

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        size = settings.section("size")
        # The sides of `size` are numbers of pixels in all; older names precede.
        least = settings.get("min_pixels")
        self._min_pixels = (
            size.integer("shortest_edge", most=_MOST_PIXELS)
            if least is None
            else settings.integer("min_pixels", most=_MOST_PIXELS)
        )
        most = settings.get("max_pixels")
        self._max_pixels = (
            size.integer("longest_edge", most=_MOST_PIXELS)
            if most is None
            else settings.integer("max_pixels", most=_MOST_PIXELS)
        )
        if self._min_pixels > self._max_pixels:
            reason = f"it must be at most {self._max_pixels}"
            if least is None:
                raise size.error("shortest_edge", reason)
            raise settings.error("min_pixels", reason)
        self._patch = settings.integer("patch_size", most=1024)
        self._frames = settings.integer("temporal_patch_size", most=64)
        self._merge = settings.integer("merge_size", most=64)

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Implement `Processor`."""
        return super().changed(with_size(given))

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings."""
        return {
            **super().read_settings(files),
            "placeholder": "<|image_pad|>",
            "embed_token": "<|image_pad|>",
        }

    def place_of_grid(self, grid: tuple[int, int, int]) -> Place:
        """Implement `ImageProcessor`."""
        time, rows, columns = grid
        if time != 1 or min(rows, columns) < 1 or rows % self._merge or columns % self._merge:
            raise RequestError(
                f"image_grid_thw is {list(grid)}; give [1, h, w], the patches of a picture in "
                f"height and width, which are multiples of {self._merge}."
            )
        rows, columns = rows // self._merge, columns // self._merge
        return Place((rows * columns,), 0, (1, rows, columns))

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        rows, columns = self.grid(height, width)
        grid = (1, rows // self._merge, columns // self._merge)
        return Place((grid[1] * grid[2],), rows * columns, grid)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the patches of a picture, those of a merged square together.

        Returns:
            `pixel_values`: float32 [patches, 3 * frames * patch_size**2], each patch in the order
            color, frame, row, column; a picture is repeated for each frame.
            `image_grid_thw`: int64 [3]: 1, and the numbers of patches in a column and in a row.
        """
        rows, columns = self.grid(*image.shape[:2])
        patch, merge = self._patch, self._merge
        if self.do_resize:
            image = resize(image, rows * patch, columns * patch, self.resample)
        planes = self.levels.of(image).reshape(
            3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        # Square, patch of the square, color, row and column of the patch.
        patches = planes.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        patches = np.broadcast_to(patches, (*patches.shape[:5], self._frames, patch, patch))
        return {
            "pixel_values": patches.reshape(rows * columns, -1),
            "image_grid_thw": integers(1, rows, columns),
        }

    def grid(self, height: int, width: int, frames: int = 1, per_patch: int = 1) -> tuple[int, int]:
        """Return the numbers of patches in a column and in a row of the scaled picture.

        Args:
            height: height of the picture in pixels.
            width: its width.
            frames: number of frames of a video that share the limits of pixels.
            per_patch: number of frames of a patch.
        """
        factor = self._patch * self._merge
        if max(height, width) > MAX_RATIO * min(height, width):
            raise RequestError(
                f"the picture has {width} x {height} pixels; its longer side may be at most "
                f"{MAX_RATIO} times its shorter one. Crop it."
            )
        if not self.do_resize:
            if height % factor or width % factor:
                raise RequestError(
                    f"the picture has {width} x {height} pixels; as the model does not scale "
                    f"pictures, both must be multiples of {factor}."
                )
            return height // self._patch, width // self._patch
        # Halves are rounded to even numbers, as in the source.
        rows, columns = round(height / factor), round(width / factor)
        depth = round(frames / per_patch) * per_patch
        if depth * rows * columns * factor**2 > self._max_pixels:
            shrunk = math.sqrt(frames * height * width / self._max_pixels)
            rows = max(1, math.floor(height / shrunk / factor))
            columns = max(1, math.floor(width / shrunk / factor))
        elif depth * rows * columns * factor**2 < self._min_pixels:
            grown = math.sqrt(self._min_pixels / (frames * height * width))
            rows = math.ceil(height * grown / factor)
            columns = math.ceil(width * grown / factor)
        return rows * self._merge, columns * self._merge
