"""Pictures scaled to a square, and crops of wide or tall ones on request: Gemma 3.

Source: `Gemma3ImageProcessorPil` and `Gemma3Processor` of transformers.
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
    read_square,
)

_AFTER = "<end_of_image>\n\n"


class Gemma3Processor(ImageProcessor):
    """Processor of Gemma 3."""

    defaults = {  # noqa: RUF012
        "size": {"height": 224, "width": 224},
        "resample": 2,
        "image_mean": HALF,
        "image_std": HALF,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    request_settings = (
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    )

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        if not self.do_resize:
            raise settings.error("do_resize", "it must be true")
        self._side = read_square(settings, "size")
        self._crops = settings.flag("do_pan_and_scan", False)
        self._min_crop = settings.integer("pan_and_scan_min_crop_size")
        self._max_crops = settings.integer("pan_and_scan_max_num_crops", least=2, most=64)
        self._min_ratio = settings.positive("pan_and_scan_min_ratio_to_activate")
        self._rows = settings.integer("image_seq_length", most=2**16)
        self._patches = settings.integer("patches", most=2**20)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a picture are read from config.json."""
        settings = super().read_settings(files)
        side = read_square(ConfigJson(settings, "size"), "size")
        patch = files.config.section("vision_config").integer("patch_size", default=14)
        rows = files.config.integer("mm_tokens_per_image", default=256)
        return {
            **settings,
            "image_seq_length": files.processor.integer("image_seq_length", default=rows),
            "patches": (side // patch) ** 2,
            "placeholder": "<start_of_image>",
            "embed_token": "<image_soft_token>",
        }

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`; a picture with crops has more rows."""
        if num_rows != self._rows:
            return None
        return Place((f"\n\n{self.placeholder}", num_rows, _AFTER), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        before, after = f"\n\n{self.placeholder}", _AFTER
        rows, columns = self._cut(height, width)
        num_crops = rows * columns
        pieces: list[Piece] = [before, self._rows, after]
        if num_crops:
            pieces[0] = f"Here is the original image {before}"
            pieces[-1] = f"{after} and here are some crops to help you see better {before}"
            for _ in range(num_crops - 1):
                pieces += [self._rows, f"{after} {before}"]
            pieces += [self._rows, after]
        return Place(tuple(pieces), (1 + num_crops) * self._patches)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return `pixel_values`: float32 [1 + crops, 3, side, side], the whole picture first."""
        height, width = image.shape[:2]
        rows, columns = self._cut(height, width)
        parts = [image]
        if rows:
            high, wide = math.ceil(height / rows), math.ceil(width / columns)
            parts += [
                image[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                for row in range(rows)
                for column in range(columns)
            ]
        sized = [resize(part, self._side, self._side, self.resample) for part in parts]
        return {"pixel_values": np.stack([self.levels.of(part) for part in sized])}

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of crops; 0, 0 without crops."""
        long, short = max(height, width), min(height, width)
        if not self._crops or long / short < self._min_ratio:
            return 0, 0
        count = min(math.floor(long / self._min_crop), math.floor(long / short + 0.5))
        count = min(self._max_crops, max(2, count))
        if min(math.ceil(long / count), short) < self._min_crop:
            return 0, 0
        return (1, count) if width >= height else (count, 1)
