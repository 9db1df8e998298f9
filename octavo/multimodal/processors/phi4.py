"""Pictures as a whole and in tiles, with white bars: Phi-4 multimodal.

Source: `Phi4MultimodalImageProcessor` and `Phi4MultimodalProcessor` of transformers. The tiles are
resized by Pillow, as in the code that Microsoft published; torchvision's results may differ by one
level of 255.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import RequestError
from octavo.models.towers.hd import MAX_TILES, HDLayout
from octavo.models.towers.siglip import read_hd_layout
from octavo.multimodal.pixels import Image, Levels, resize, resize_bicubic
from octavo.multimodal.processors.base import (
    HALF,
    ImageProcessor,
    ModelFiles,
    Place,
    integers,
    read_square,
    read_token,
)
from octavo.multimodal.processors.internvl import grids_of_tiles, nearest_grid

_LEAST_SIDE = 10
"""Least height and width of a picture when it is scaled, in pixels."""
_BILINEAR, _BICUBIC = 2, 3
_TOKEN, _TOKEN_ID = "<|endoftext10|>", 200010
"""Placeholder, and token of a row, if no file of the model says it."""


class Phi4Processor(ImageProcessor):
    """Processor of Phi-4 multimodal."""

    defaults = {  # noqa: RUF012
        "size": {"height": 448, "width": 448},
        "dynamic_hd": MAX_TILES,
        "resample": _BICUBIC,
        "image_mean": HALF,
        "image_std": HALF,
    }
    request_settings = ("dynamic_hd",)

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        settings.refuse("resample", _BICUBIC, "only 3, bicubic, is supported")
        settings.refuse("do_rescale", True, "it must be true")
        settings.refuse("do_normalize", True, "it must be true")
        # As transformers fuses both steps.
        factor = np.float32(1 / settings.positive("rescale_factor", 1 / 255))
        mean, std = (
            tuple(float(np.float32(n) * factor) for n in settings.numbers(name, 3))
            for name in ("image_mean", "image_std")
        )
        self.levels = Levels(None, mean, std)
        side = read_square(settings, "size")
        self._layout = HDLayout(3, side, settings.integer("patch_size", most=side // 2))
        self._max_tiles = settings.integer("dynamic_hd", most=MAX_TILES)
        self._grids = grids_of_tiles(1, self._max_tiles)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the size of a patch is read from config.json.

        Raises:
            ModelError: the tiles of the processor are not those of the tower.
        """
        settings, layout = super().read_settings(files), read_hd_layout(files.config)
        if read_square(ConfigJson(settings, files.preprocessor.where), "size") != layout.size:
            raise files.preprocessor.error("size", f"the model reads tiles of {layout.size} pixels")
        vision = files.config.section("vision_config")
        token_id = vision.integer("image_token_id", default=_TOKEN_ID, least=0)
        token = read_token(files.tokenizer, "image", _TOKEN, token_id)
        return {
            **settings,
            "patch_size": layout.patch,
            "placeholder": token,
            "embed_token": token,
        }

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place((num_rows,), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        grid, _, seen = self._fit(height, width)
        tokens, rows = self._layout.counts(grid, seen)
        return Place((rows,), tokens)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the whole picture, with its bars, and its tiles, row by row.

        Returns:
            `image_pixel_values`: float32 [1 + tiles, 3, side, side].
            `image_sizes`: int64 [2], height and width of all tiles together.
            `seen_patches`: int64 [2], rows and columns of patches in front of the bars; they are
            what `image_attention_mask` says in transformers.
        """
        (rows, columns), size, seen = self._fit(*image.shape[:2])
        side = self._layout.size
        canvas = np.full((rows * side, columns * side, 3), 255, np.uint8)
        canvas[: size[0], : size[1]] = resize(image, *size, _BILINEAR)
        planes = self.levels.of(canvas)
        pixels = np.empty((1 + rows * columns, 3, side, side), np.float32)
        pixels[0] = resize_bicubic(planes, side, side)
        tiles = planes.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        pixels[1:] = tiles.reshape(rows * columns, 3, side, side)
        return {
            "image_pixel_values": pixels,
            "image_sizes": integers(*canvas.shape[:2]),
            "seen_patches": integers(*seen),
        }

    def _fit(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """Return rows and columns of tiles, the size of the scaled picture, and of its patches."""
        side, patch = self._layout.size, self._layout.patch
        columns, rows = math.ceil(width / side), math.ceil(height / side)
        if rows * columns > self._max_tiles:
            columns, rows = nearest_grid(height, width, self._grids, side)
        by_height, by_width = rows * side / height, columns * side / width
        if by_width < by_height:
            size = int(height * by_width), columns * side
        else:
            size = rows * side, int(width * by_height)
        if min(size) < _LEAST_SIDE:
            raise RequestError(
                f"the picture has {width} x {height} pixels; the model would scale it to "
                f"{size[1]} x {size[0]}, and reads at least {_LEAST_SIDE} on each axis. Crop it: "
                "it is too narrow."
            )
        seen = -(-size[0] // patch), -(-size[1] // patch)
        return (rows, columns), size, seen
