"""Pictures that keep their aspect ratio, scaled to about as many patches: Gemma 4.

Source: `Gemma4ImageProcessorPil`, `Gemma4UnifiedImageProcessor` and `Gemma4Processor` of
transformers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import RequestError
from octavo.multimodal.pixels import Image, resize
from octavo.multimodal.processors.base import ImageProcessor, ModelFiles, Place

_ROWS = (70, 140, 280, 560, 1120)


class Gemma4Processor(ImageProcessor):
    """Processor of Gemma 4."""

    defaults = {  # noqa: RUF012
        "resample": 3,
        "do_normalize": False,
        "image_mean": (0.0, 0.0, 0.0),
        "image_std": (1.0, 1.0, 1.0),
        "patch_size": 16,
        "max_soft_tokens": 280,
        "pooling_kernel_size": 3,
    }
    request_settings = ("max_soft_tokens",)

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        if not self.do_resize:
            raise settings.error("do_resize", "it must be true")
        self._patch = settings.integer("patch_size", most=1024)
        self._group = settings.integer("pooling_kernel_size", most=64)
        self.most_rows = settings.integer("max_soft_tokens")
        if self.most_rows not in _ROWS:
            raise settings.error("max_soft_tokens", f"supported: {', '.join(map(str, _ROWS))}")

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings."""
        tokens = {"placeholder": "<|image|>", "embed_token": "<|image|>"}
        return {**super().read_settings(files), **tokens}

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place(("<|image>", num_rows, "<image|>"), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        rows, columns = self._squares(height, width)
        count = rows * columns
        return Place(("<|image>", count, "<image|>"), count * self._group**2)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return `pixel_values`, float32 [T, patch * patch * 3], and `image_position_ids`.

        The latter are int64 [T, 2]: column and row of each patch. Patches follow each other row by
        row; transformers appends patches of zeros.
        """
        patch, group = self._patch, self._group
        rows, columns = (n * group for n in self._squares(*image.shape[:2]))
        height, width = rows * patch, columns * patch
        if image.shape[:2] != (height, width):
            image = resize(image, height, width, self.resample)
        pixels = self.levels.of(image).reshape(3, rows, patch, columns, patch)
        patches = pixels.transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        at = np.arange(rows * columns)
        places = np.stack([at % columns, at // columns], 1)
        return {"pixel_values": np.ascontiguousarray(patches), "image_position_ids": places}

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and of columns of squares of patches.

        Raises:
            RequestError: the picture is too narrow.
        """
        side, most = self._group * self._patch, self.most_rows
        factor = math.sqrt(most * self._group**2 * self._patch**2 / (height * width))
        rows, columns = (math.floor(factor * n / side) for n in (height, width))
        if not rows and not columns:  # only with one square
            raise RequestError(f"it has {width} x {height} pixels, and the model needs more rows.")
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        if rows * columns > most:
            raise RequestError(
                f"it has {width} x {height} pixels, which are too narrow for {most} embeddings."
            )
        return rows, columns


class Gemma4UnifiedProcessor(Gemma4Processor):
    """Processor of Gemma 4 12B: a patch is what is a square of patches in the other models."""

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self._patch, self._group = self._patch * self._group, 1
