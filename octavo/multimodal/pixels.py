"""Operations on pixels, equal to the last bit to those of transformers' image processors.

The reference is the Pillow backend of transformers 5 (`image_transforms.py`), which has the
arithmetic of the "slow" processors of version 4. Its "fast" processors resize with torchvision,
whose results differ by a few levels of 255.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError

Image = NDArray[np.uint8]
"""Picture: uint8 [height, width, 3]."""

MAX_SIDE = 2**14
"""Maximum side of a size in a model's files."""
MAX_RESIZED = 2**26
"""Maximum number of pixels of an enlarged picture."""


def resize(image: Image, height: int, width: int, resample: int) -> Image:
    """Return a picture with another size.

    Args:
        image: the picture.
        height: its new height.
        width: its new width.
        resample: Pillow's number of the filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box,
            5 Hamming.

    Raises:
        RequestError: the result would be huge.
    """
    import PIL.Image  # only the process that reads pictures has Pillow

    if height * width > MAX_RESIZED:
        raise RequestError(
            f"the picture has {image.shape[1]} x {image.shape[0]} pixels; the model would scale it "
            f"to {width} x {height}, more than the limit of {MAX_RESIZED} pixels. Crop it: it is "
            "too narrow."
        )
    filter_ = PIL.Image.Resampling(resample)
    return np.asarray(PIL.Image.fromarray(image).resize((width, height), filter_))


def resize_bicubic(planes: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Return numbers of pixels, scaled with cubic convolution (Keys 1981), without a wider filter.

    The arithmetic is that of torch's `interpolate` on processors with fused products and sums.

    Args:
        planes: float32 [colors, height, width].
        height: new height.
        width: new width.
    """
    lines, line_weights = _taps(planes.shape[1], height)
    columns, column_weights = _taps(planes.shape[2], width)
    used, lines = np.unique(lines, return_inverse=True)
    lines = lines.reshape(height, 4)
    planes = planes[:, used]
    planes = _sum([planes[:, :, tap] for tap in columns.T], list(column_weights.T))
    return _sum([planes[:, tap] for tap in lines.T], [it[:, None] for it in line_weights.T])


def _taps(size: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the four pixels of each new pixel of an axis, int64 and float32 [new, 4]."""
    ratio, sharpness = np.float32(size) / np.float32(new), np.float32(-0.75)
    at = _fused(ratio, np.arange(new, dtype=np.float32) + np.float32(0.5), np.float32(-0.5))
    low = np.floor(at)
    near = at - low
    far = np.float32(1) - near

    def inner(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return _fused(sharpness + 2, x, -(sharpness + 3)) * x * x + np.float32(1)

    def outer(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return _fused(_fused(sharpness, x, -5 * sharpness), x, 8 * sharpness) * x - 4 * sharpness

    one = np.float32(1)
    weights = np.stack([outer(near + one), inner(near), inner(far), outer(far + one)], 1)
    taps = low.astype(np.int64)[:, None] + np.arange(-1, 3)
    return np.clip(taps, 0, size - 1), weights


def _sum(
    parts: Sequence[NDArray[np.float32]], weights: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the weighted sum of four parts."""
    total = parts[1] * weights[1]
    for i in (0, 2, 3):
        total = _fused(parts[i], weights[i], total)
    return total


def _fused(a: Any, b: NDArray[np.float32], c: Any) -> NDArray[np.float32]:
    """Return a * b + c in float32, rounded once."""
    result: NDArray[np.float32] = (np.asarray(a, np.float64) * b + c).astype(np.float32)
    return result


def center_crop(image: Image, height: int, width: int) -> Image:
    """Return the middle of a picture; beyond its edges there is black."""
    rows, columns = image.shape[:2]
    if rows < height or columns < width:
        larger = np.zeros((max(rows, height), max(columns, width), 3), np.uint8)
        top, left = -((rows - len(larger)) // 2), -((columns - larger.shape[1]) // 2)
        larger[top : top + rows, left : left + columns] = image
        # The middle is that of the original, not that of the larger picture.
        top += (rows - height) // 2
        left += (columns - width) // 2
        return larger[top : top + height, left : left + width]
    top, left = (rows - height) // 2, (columns - width) // 2
    return image[top : top + height, left : left + width]


def pad_to_square(image: Image, color: tuple[int, ...]) -> Image:
    """Return a picture in the middle of a square of one color."""
    rows, columns = image.shape[:2]
    if rows == columns:
        return image
    side = max(rows, columns)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = color
    top, left = (side - rows) // 2, (side - columns) // 2
    square[top : top + rows, left : left + columns] = image
    return square


class Levels:
    """The numbers that a model reads instead of the levels 0 to 255 of each color.

    Args:
        rescale_factor: factor of the levels; None: 1.
        mean: number to subtract, for each color; None: 0.
        std: divisor, for each color.
    """

    def __init__(
        self,
        rescale_factor: float | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
    ) -> None:
        levels = np.arange(256, dtype=np.float64)
        if rescale_factor is not None:
            levels *= rescale_factor
        table = np.repeat(levels.astype(np.float32)[None], 3, axis=0)
        if mean is not None and std is not None:
            table = (table - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[
                :, None
            ]
        self._table = table

    def of(self, image: Image) -> NDArray[np.float32]:
        """Return the numbers of a picture: float32 [3, height, width]."""
        planes = np.empty((3, *image.shape[:2]), np.float32)
        for color in range(3):
            np.take(self._table[color], image[:, :, color], out=planes[color])
        return planes
