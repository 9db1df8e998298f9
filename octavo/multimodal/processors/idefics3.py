"""Pictures cut into tiles, with the whole picture as the last tile: Idefics3 and SmolVLM.

Source: `Idefics3ImageProcessorPil`, `SmolVLMImageProcessorPil` and `Idefics3Processor` of
transformers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import (
    HALF,
    ImageProcessor,
    ModelFiles,
    Piece,
    Place,
    integers,
    read_size,
)

MAX_SIDE = 4096
"""Maximum side of a picture before it is cut into tiles."""

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3Processor(ImageProcessor):
    """Processor of Idefics3 and SmolVLM."""

    defaults = {  # noqa: RUF012
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "do_image_splitting": True,
        "image_mean": HALF,
        "image_std": HALF,
    }
    request_settings = ("do_image_splitting", "size")

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        (self._longest,) = read_size(settings, "size", "longest_edge")
        (self._tile,) = read_size(settings, "max_image_size", "longest_edge")
        self._splits = settings.flag("do_image_splitting", True)
        self._tile_rows = settings.integer("image_seq_len", most=2**16)
        self._tile_patches = settings.integer("tile_patches", most=2**20)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a tile are read from config.json if not elsewhere."""
        settings = super().read_settings(files)
        vision = files.config.section("vision_config")
        (tile,) = read_size(ConfigJson(settings, "size"), "max_image_size", "longest_edge")
        patches = (tile // vision.integer("patch_size", default=32)) ** 2
        scale = files.config.integer("scale_factor", default=2)
        return {
            **settings,
            "tile_patches": patches,
            "image_seq_len": files.processor.get("image_seq_len") or patches // scale**2,
            "placeholder": "<image>",
            "embed_token": "<image>",
        }

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        rows, columns = self._tiles(height, width)
        patches = (rows * columns + 1) * self._tile_patches
        pieces: list[Piece] = []
        for row in range(rows):
            for column in range(columns):
                name = f"<row_{row + 1}_col_{column + 1}>"
                before = "\n" if row and not column else ""
                pieces += [f"{before}{_AROUND}{name}", self._tile_rows]
        before = "\n\n" if rows else ""
        pieces += [f"{before}{_AROUND}{_WHOLE}", self._tile_rows, _AROUND]
        return Place(tuple(pieces), patches)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the tiles of a picture, row by row, and the whole picture as the last one.

        Returns:
            `pixel_values`: float32 [tiles, 3, side, side].
            `tiles`: int64 [2]: rows and columns of tiles; 0, 0 for a picture that is not cut.
        """
        if self.do_resize:
            image = resize(image, *self._resized(*image.shape[:2]), self.resample)
        tile = self._tile
        if not self._splits:
            whole = resize(image, tile, tile, self.resample)
            return {"pixel_values": self.levels.of(whole)[None], "tiles": integers(0, 0)}
        rows, columns = self._cut(*image.shape[:2])
        image = resize(image, rows * tile, columns * tile, self.resample)
        tiles = [image]
        if rows * columns > 1:
            tiles = [
                image[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
                for row in range(rows)
                for column in range(columns)
            ]
            tiles.append(resize(image, tile, tile, self.resample))
        else:
            rows = columns = 0
        pixels = np.stack([self.levels.of(one) for one in tiles])
        return {"pixel_values": pixels, "tiles": integers(rows, columns)}

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles; 0, 0 for a picture that is not cut."""
        if not self._splits:
            return 0, 0
        if self.do_resize:
            height, width = self._resized(height, width)
        rows, columns = self._cut(height, width)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides of a picture whose longer one has the configured length."""
        longest, ratio = self._longest, width / height
        if width >= height:
            width = longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = longest
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            width = MAX_SIDE
            height = int(width / ratio)
        elif height > width and height > MAX_SIDE:
            height = MAX_SIDE
            width = int(height * ratio)
        return max(height, 1), max(width, 1)

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles that cover a picture; 1, 1 for one tile."""
        tile, ratio = self._tile, width / height
        if width >= height:
            columns = math.ceil(width / tile)
            return max(1, math.ceil(int(columns * tile / ratio) / tile)), columns
        rows = math.ceil(height / tile)
        return rows, max(1, math.ceil(int(rows * tile * ratio) / tile))
