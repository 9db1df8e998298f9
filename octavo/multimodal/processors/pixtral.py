"""Pictures of nearly their own size, whose rows of patches end with a token: Pixtral, Mistral 3.

Source: `PixtralImageProcessorPil` and `PixtralProcessor` of transformers.
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import (
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    ModelFiles,
    Piece,
    Place,
    integers,
    read_size,
)


class PixtralProcessor(ImageProcessor):
    """Processor of Pixtral, Mistral Small 3.1 and later, and Ministral 3."""

    defaults = {  # noqa: RUF012
        "size": {"longest_edge": 1024},
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    request_settings = ("size",)

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        if not self.do_resize:
            raise settings.error("do_resize", "it must be true")
        (self._longest,) = read_size(settings, "size", "longest_edge")
        self._patch = settings.integer("patch_size", most=1024)
        self._merge = settings.integer("spatial_merge_size", most=64)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; sizes of patches are read from config.json."""
        merge = files.config.integer("spatial_merge_size", default=1)
        return {
            **super().read_settings(files),
            "patch_size": files.config.section("vision_config").integer("patch_size", default=16),
            "spatial_merge_size": files.processor.integer("spatial_merge_size", default=merge),
            "placeholder": files.processor.get("image_token") or "[IMG]",
            "embed_token": files.processor.get("image_token") or "[IMG]",
            "image_break_token": files.processor.get("image_break_token") or "[IMG_BREAK]",
            "image_end_token": files.processor.get("image_end_token") or "[IMG_END]",
        }

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        rows, columns = self._grid(height, width)
        pieces: list[Piece] = [columns, self.settings.get("image_break_token")] * rows
        pieces[-1] = self.settings.get("image_end_token")
        return Place(tuple(pieces), rows * columns * self._merge**2)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the scaled picture.

        Returns:
            `pixel_values`: float32 [3, height, width].
            `image_sizes`: int64 [2]: height and width.
        """
        rows, columns = self._grid(*image.shape[:2])
        step = self._patch * self._merge
        image = resize(image, rows * step, columns * step, self.resample)
        return {
            "pixel_values": self.levels.of(image),
            "image_sizes": integers(*image.shape[:2]),
        }

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of merged patches in a column and in a row."""
        ratio = max(height / self._longest, width / self._longest)
        if ratio > 1:
            height = max(1, math.floor(height / ratio))
            width = max(1, math.floor(width / ratio))
        step = self._patch * self._merge
        return (height - 1) // step + 1, (width - 1) // step + 1
