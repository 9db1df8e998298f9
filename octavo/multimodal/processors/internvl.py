"""Pictures cut into the grid of square tiles that is nearest to their shape: InternVL.

Source: `GotOcr2ImageProcessorPil` and `InternVLProcessor` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageProcessor,
    ModelFiles,
    Place,
    read_square,
)


class InternVLProcessor(ImageProcessor):
    """Processor of InternVL 2.5 and later in transformers' format."""

    defaults = {  # noqa: RUF012
        "size": {"height": 384, "width": 384},
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "min_patches": 1,
        "max_patches": 12,
    }
    request_settings = ("crop_to_patches", "min_patches", "max_patches")

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        if not self.do_resize:
            raise settings.error("do_resize", "it must be true")
        self._side = read_square(settings, "size")
        self._min_tiles = settings.integer("min_patches", most=256)
        self._max_tiles = settings.integer("max_patches", least=self._min_tiles, most=256)
        if not settings.flag("crop_to_patches", True):
            self._min_tiles = self._max_tiles = 1
        self._tile_rows = settings.integer("image_seq_length", most=2**16)
        self._tile_patches = settings.integer("tile_patches", most=2**20)
        self._grids = grids_of_tiles(self._min_tiles, self._max_tiles)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a tile are read from config.json if not elsewhere."""
        settings = super().read_settings(files)
        side = read_square(ConfigJson(settings, "size"), "size")
        vision = files.config.section("vision_config")
        patch = vision.get("patch_size") or 14
        patch = patch[0] if isinstance(patch, list) else patch
        rows = files.config.integer("image_seq_length", default=256)
        return {
            **settings,
            # The processor of InternVL cuts pictures, whatever the file of pictures says.
            "crop_to_patches": True,
            "image_seq_length": files.processor.integer("image_seq_length", default=rows),
            "tile_patches": (side // patch) ** 2 + 1,
            "placeholder": "<IMG_CONTEXT>",
            "embed_token": "<IMG_CONTEXT>",
        }

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place(("<img>", num_rows, "</img>"), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        columns, rows = self._grid(height, width)
        tiles = rows * columns
        tiles += tiles > 1
        pieces = ("<img>", tiles * self._tile_rows, "</img>")
        return Place(pieces, tiles * self._tile_patches)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the tiles, row by row, and the whole picture as the last of several.

        Returns:
            `pixel_values`: float32 [tiles, 3, side, side].
        """
        columns, rows = self._grid(*image.shape[:2])
        side = self._side
        large = resize(image, rows * side, columns * side, self.resample)
        tiles = [
            large[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(resize(image, side, side, self.resample))
        return {"pixel_values": np.stack([self.levels.of(tile) for tile in tiles])}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the columns and rows of tiles."""
        return nearest_grid(height, width, self._grids, self._side)


def nearest_grid(
    height: int, width: int, grids: Sequence[tuple[int, int]], side: int
) -> tuple[int, int]:
    """Return the columns and rows of tiles that are nearest to a picture's ratio of sides.

    Of two grids that are equally near, the later one counts if the picture has more than half of
    its pixels.

    Args:
        height: height of the picture in pixels.
        width: its width.
        grids: pairs of columns and rows, those of few tiles first.
        side: pixels of a side of a tile.
    """
    ratio, area = width / height, width * height
    best, best_difference = (1, 1), float("inf")
    for columns, rows in grids:
        difference = abs(ratio - columns / rows)
        if difference < best_difference:
            best, best_difference = (columns, rows), difference
        elif difference == best_difference and area > 0.5 * side * side * columns * rows:
            best = (columns, rows)
    return best


def grids_of_tiles(least: int, most: int) -> list[tuple[int, int]]:
    """Return the pairs of columns and rows of `least` to `most` tiles, those of few tiles first."""
    sides = range(1, most + 1)
    grids = [(x, y) for x in sides for y in sides if least <= x * y <= most]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


class InternVLChatProcessor(InternVLProcessor):
    """Processor of InternVL as OpenGVLab publishes it; config.json has the settings.

    Source: the code of its model cards.
    """

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings."""
        config = files.config
        vision = config.section("vision_config")
        config.refuse("pad2square", False, "filling pictures up to squares is not supported")
        config.refuse("use_thumbnail", True, "tiles without the whole picture are not supported")
        side = config.integer("force_image_size", default=vision.integer("image_size"))
        patches = side // vision.integer("patch_size", default=14)
        factor = config.positive("downsample_ratio", 0.5)
        return {
            **cls.defaults,
            "size": {"height": side, "width": side},
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
            "crop_to_patches": config.flag("dynamic_image_size", True),
            "min_patches": config.integer("min_dynamic_patch", default=1),
            "max_patches": config.integer("max_dynamic_patch", default=12),
            "image_seq_length": round(patches * factor) ** 2,
            "tile_patches": patches**2 + 1,
            "placeholder": "<IMG_CONTEXT>",
            "embed_token": "<IMG_CONTEXT>",
        }
