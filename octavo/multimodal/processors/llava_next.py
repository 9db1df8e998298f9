"""Pictures as a whole and in tiles, with bars at their edges: LLaVA-NeXT and LLaVA-OneVision.

Source: `LlavaNextImageProcessorPil`, `LlavaOnevisionImageProcessorPil`, `LlavaNextProcessor` and
`LlavaOnevisionProcessor` of transformers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.towers.anyres import AnyresLayout
from octavo.models.towers.pixels import TileLayout
from octavo.models.towers.siglip import read_limit, read_resolutions
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import (
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    ModelFiles,
    Place,
    integers,
    read_size,
    read_square,
)

_TOWERS = ("clip_vision_model", "siglip_vision_model")


class LlavaNextProcessor(ImageProcessor):
    """Processor of LLaVA-NeXT."""

    defaults = {  # noqa: RUF012
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        if not self.do_resize:
            raise settings.error("do_resize", "it must be true")
        self._side = _read_side(settings)
        tiles = TileLayout(
            3,
            self._side,
            settings.integer("patch_size", most=1024),
            has_class=settings.flag("has_class", False),
        )
        limit = settings.get("limit")
        self.layout = AnyresLayout(tiles, read_resolutions(settings, self._side), limit)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a tile are read from config.json."""
        vision = files.config.section("vision_config")
        kind = vision.choice("model_type", {name: name for name in _TOWERS}, "clip_vision_model")
        return {
            **super().read_settings(files),
            "patch_size": vision.integer("patch_size", default=14),
            "has_class": kind == "clip_vision_model",
            "placeholder": "<image>",
            "embed_token": "<image>",
        }

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place((num_rows,), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        packing = self.layout.packing(height, width)
        tiles = 1 + math.prod(packing.grid)
        rows = packing.side**2 + packing.num_rows
        return Place((rows,), tiles * self.layout.num_tokens)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the whole picture and its tiles, line by line.

        Returns:
            `pixel_values`: float32 [1 + tiles, 3, side, side].
            `image_sizes`: int64 [2]: height and width.
        """
        height, width = image.shape[:2]
        lines, columns = self.layout.packing(height, width).grid
        side = self._side
        canvas = np.zeros((lines * side, columns * side, 3), np.uint8)
        inner = resize(image, *_fitted((height, width), canvas.shape[:2]), self.resample)
        top, left = ((a - b) // 2 for a, b in zip(canvas.shape[:2], inner.shape[:2], strict=True))
        canvas[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
        tiles = canvas.reshape(lines, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        whole = resize(image, side, side, self.resample)
        pixels = [self.levels.of(one) for one in (whole, *tiles.reshape(-1, side, side, 3))]
        return {"pixel_values": np.stack(pixels), "image_sizes": integers(height, width)}


class OneVisionProcessor(LlavaNextProcessor):
    """Processor of LLaVA-OneVision."""

    defaults = {  # noqa: RUF012
        **LlavaNextProcessor.defaults,
        "size": {"height": 384, "width": 384},
        "do_center_crop": False,
        "image_grid_pinpoints": [
            [y, x] for y in range(384, 2305, 384) for x in range(384, 2305, 384)
        ],
    }

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; also the limit of tiles is read from config.json."""
        return {**super().read_settings(files), "limit": read_limit(files.config)}


def _read_side(settings: ConfigJson) -> int:
    """Return the side of a tile."""
    if "shortest_edge" in settings.section("size").fields:
        (side,) = read_size(settings, "size", "shortest_edge")
    else:
        side = read_square(settings, "size")
    if settings.flag("do_center_crop", False) and read_square(settings, "crop_size") != side:
        raise settings.error("crop_size", f"it must be {side} x {side}, the size of a tile")
    return side


def _fitted(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the largest size with the same ratio of sides that fits into a canvas."""
    (height, width), (canvas_height, canvas_width) = size, canvas
    by_width, by_height = canvas_width / width, canvas_height / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), canvas_height), canvas_width
    return canvas_height, min(math.ceil(width * by_height), canvas_width)
