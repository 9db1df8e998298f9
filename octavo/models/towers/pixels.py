"""Division of pictures into patches: the arrays that towers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.models.blocks.encoder_input import Arrays, EncoderItem, LongArray

Floats = NDArray[np.float32]


def cut_patches(pixels: Floats, patch: int) -> Floats:
    """Return the patches of pictures [N, C, H, W] in rows: [N * H / patch * W / patch, C * patch²].

    The patches of a picture follow each other row by row.
    """
    count, channels, height, width = pixels.shape
    grid = pixels.reshape(count, channels, height // patch, patch, width // patch, patch)
    return grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch * patch)


def group_tokens(height: int, width: int, group: int) -> LongArray:
    """Return the tokens of each square of group x group patches, square by square: int64 [H * W].

    Squares follow each other row by row, and so do the patches of a square. The tokens are the
    patches row by row.
    """
    tokens = np.arange(height * width).reshape(height // group, group, width // group, group)
    return tokens.transpose(0, 2, 1, 3).ravel()


def refuse_shape(array: NDArray[Any], name: str, expected: str) -> RequestError:
    """Return the error for an array that does not fit the model."""
    return RequestError(
        f"{name} has shape {list(array.shape)}, and the model reads {expected}; prepare the "
        "picture with the model's own processor."
    )


@dataclass(frozen=True)
class TileLayout:
    """Pictures, or tiles of a picture, of one size; each is a segment.

    The item's array is `pixel_values`, float32 [N, channels, size, size], or one of them.
    """

    channels: int
    size: int
    """Height and width in pixels."""
    patch: int
    """Height and width of a patch; a rest of the pixels is not read."""
    has_class: bool = False
    """True if a class token precedes the patches: its learned vector follows the positions in the
    table, and the position of the first patch is 1."""
    has_bias: bool = False
    """True if the last row of the table is the bias of the projection, which only patches have."""
    drops_class: bool = False
    """True if the class token has no row in the result."""
    group: int = 1
    """Height and width of the squares of patches that become one row."""
    averages: bool = False
    """True if a row is the mean of its square."""

    @property
    def side(self) -> int:
        """Number of patches of a row, and of rows."""
        return self.size // self.patch

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a picture."""
        return self.side**2 + self.has_class

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.num_tokens

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        pixels = data["pixel_values"]
        shape = self.channels, self.size, self.size
        if pixels.ndim not in (3, 4) or pixels.shape[-3:] != shape or not len(pixels):
            raise refuse_shape(pixels, "pixel_values", f"pictures of {list(shape)}")
        count = len(pixels) if pixels.ndim == 4 else 1
        has_class = self.has_class and not self.drops_class
        rows = self.num_tokens if has_class else (self.side // self.group) ** 2
        return count * self.num_tokens, count * rows

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        pixels = data["pixel_values"]
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        side = self.side * self.patch
        return self._item(cut_patches(pixels[:, :, :side, :side].astype(np.float32), self.patch))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        count, numbers = num_tokens // self.num_tokens, self.channels * self.patch**2
        return self._item(np.zeros((count * self.side**2, numbers), np.float32))

    def _item(self, patches: Floats) -> EncoderItem:
        area, tokens = self.side**2, self.num_tokens
        count = len(patches) // area
        if self.has_class:
            whole = np.zeros((count, tokens, patches.shape[1]), np.float32)
            whole[:, 1:] = patches.reshape(count, area, -1)
            patches = whole.reshape(count * tokens, -1)
        arrays: dict[str, NDArray[Any]] = {}
        indices: dict[str, NDArray[Any]] = {}
        places, weights = self._places()
        arrays["places"] = np.tile(places, (count, 1))
        if weights is not None:
            arrays["weights"] = np.tile(weights, (count, 1))
        chosen = group_tokens(self.side, self.side, self.group) + self.has_class
        if self.has_class and not self.drops_class:
            chosen = np.arange(tokens)
        chosen = (np.arange(count)[:, None] * tokens + chosen).ravel()
        if self.averages:
            squares = chosen.reshape(-1, self.group**2).astype(np.int32)
            indices["averaged_tokens"] = squares
            arrays["shares"] = np.full(squares.shape, 1 / self.group**2, np.float32)
            num_rows = len(squares)
        else:
            indices["output_tokens"] = chosen
            num_rows = len(chosen) // self.group**2
        return EncoderItem(
            num_rows,
            (np.full(count, tokens),),
            numbers={"patches": patches},
            arrays=arrays,
            indices=indices,
        )

    def _places(self) -> tuple[NDArray[np.int32], Floats | None]:
        """Return the rows of the table that are added to the tokens of a picture, with factors."""
        tokens = self.num_tokens
        positions = np.arange(tokens, dtype=np.int32)
        if not self.has_class:
            return positions[:, None], None
        # The class token has its vector in addition, and the others have the bias, if any.
        others = np.full(tokens, tokens + self.has_bias, np.int32)
        weights = np.ones((tokens, 2), np.float32)
        others[0] = tokens
        if not self.has_bias:
            others[1:], weights[1:, 1] = 0, 0
        return np.stack([positions, others], 1), weights


def axial_rotary(
    rows: LongArray, columns: LongArray, row_rates: Floats, column_rates: Floats
) -> Floats:
    """Return cosines and sines of patches: float32 [T, 4 * rates], for pairs (i, i + half).

    The first half of the pairs of a head turns with the row of the patch, the second one with its
    column (Su et al., arXiv:2104.09864, for each axis).

    Args:
        rows: int64 [T].
        columns: int64 [T].
        row_rates: angle of each pair for one row: float32 [rates].
        column_rates: the same for one column.
    """
    tables = []
    for axis, rates in ((rows, row_rates), (columns, column_rates)):
        angles = np.arange(axis.max(initial=0) + 1, dtype=np.float32)[:, None] * rates
        wide = angles.astype(np.float64)
        tables.append(
            (np.cos(wide).astype(np.float32)[axis], np.sin(wide).astype(np.float32)[axis])
        )
    (row_cos, row_sin), (column_cos, column_sin) = tables
    return np.concatenate([row_cos, column_cos, row_sin, column_sin], 1)


def rates(theta: float, exponents: NDArray[np.float32]) -> Floats:
    """Return the rates 1 / theta ** exponents, in float32 as transformers rounds them."""
    powers: Floats = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


@dataclass(frozen=True)
class GridLayout:
    """Pictures of any size, already in patches, and videos (Qwen-VL).

    The item's arrays are `pixel_values`, float32 [T, numbers of a patch], and `image_grid_thw`,
    int64 [3]: frames, rows and columns of patches; for a video `pixel_values_videos` and
    `video_grid_thw`. The patches of a square of `merge` x `merge` follow each other, as do squares
    row by row. A frame is a segment of the first kind, and a window of the second.
    """

    numbers: int
    """Numbers of a patch."""
    merge: int
    """Height and width of the squares of patches that become one row."""
    head_size: int
    theta: float = 1e4
    """Base of the rotary positions."""
    window: int | None = None
    """Height and width of the windows in squares; None: there are no windows."""
    side: int | None = None
    """Number of rows and columns of the grid of learned positions, between which positions are
    interpolated; None: there are no learned positions."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        name, patches, grid = self._parts(data)
        if (
            len(grid) != 3
            or min(grid) < 1
            or grid[1] % self.merge
            or grid[2] % self.merge
            or patches.shape != (grid[0] * grid[1] * grid[2], self.numbers)
        ):
            raise refuse_shape(patches, name, f"patches of {self.numbers} numbers in a grid {grid}")
        return len(patches), len(patches) // self.merge**2

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        _, patches, grid = self._parts(data)
        return self._item(patches.astype(np.float32, copy=False), *grid)

    @staticmethod
    def _parts(data: Arrays) -> tuple[str, NDArray[Any], list[int]]:
        """Return the name of the patches, the patches, and their grid."""
        is_video = "pixel_values_videos" in data
        name = "pixel_values_videos" if is_video else "pixel_values"
        grid = data["video_grid_thw" if is_video else "image_grid_thw"]
        return name, data[name], [int(n) for n in grid.ravel()]

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        columns = num_tokens // self.merge // self.merge * self.merge
        patches = np.zeros((columns * self.merge, self.numbers), np.float32)
        return self._item(patches, 1, self.merge, columns)

    def _item(self, patches: Floats, frames: int, height: int, width: int) -> EncoderItem:
        merge, area = self.merge, height * width
        order = group_tokens(height, width, merge)
        segments = [np.full(frames, area)]
        indices: dict[str, NDArray[Any]] = {}
        if self.window is not None:
            unit = merge**2
            squares, sizes = _windows(height // merge, width // merge, self.window)
            in_window = (squares[:, None] * unit + np.arange(unit)).ravel()
            starts = np.arange(frames)[:, None] * area
            order = order[in_window]
            patches = patches[(starts + in_window).ravel()]
            indices["output_tokens"] = (starts + np.argsort(in_window)).ravel()
            segments.append(np.tile(sizes * unit, frames))
        rows, columns = order // width, order % width
        arrays: dict[str, NDArray[Any]] = {}
        if self.side is not None:
            places, weights = _interpolate(rows, columns, height, width, self.side)
            arrays["places"] = np.tile(places, (frames, 1))
            arrays["weights"] = np.tile(weights, (frames, 1))
        pairs = np.arange(0, self.head_size // 2, 2, dtype=np.float32)
        speeds = rates(self.theta, pairs / np.float32(self.head_size // 2))
        return EncoderItem(
            frames * area // merge**2,
            tuple(segments),
            numbers={"patches": patches},
            arrays=arrays,
            indices=indices,
            rotary=np.tile(axial_rotary(rows, columns, speeds, speeds), (frames, 1)),
        )


def _windows(height: int, width: int, window: int) -> tuple[LongArray, LongArray]:
    """Return the squares of a frame window by window, and the number of each window."""
    squares = np.arange(height * width).reshape(height, width)
    parts: Sequence[LongArray] = [
        squares[row : row + window, column : column + window].ravel()
        for row in range(0, height, window)
        for column in range(0, width, window)
    ]
    return np.concatenate(parts), np.array([len(part) for part in parts])


def _interpolate(
    rows: LongArray, columns: LongArray, height: int, width: int, side: int
) -> tuple[NDArray[np.int32], Floats]:
    """Return four places in a grid of side x side positions, and their shares, of each patch.

    The corners of the picture are those of the grid; positions between are bilinear.
    """
    places, shares = [], []
    for at, size in ((rows, height), (columns, width)):
        step = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(step)
        taps = low.astype(np.int64)[:, None] + np.arange(2)
        places.append(np.minimum(taps, side - 1))
        shares.append(1 - np.abs((step - low)[:, None] - np.arange(2, dtype=np.float32)))
    where = (places[0][:, :, None] * side + places[1][:, None]).reshape(-1, 4)
    share = (shares[0][:, :, None] * shares[1][:, None]).reshape(-1, 4)
    return where.astype(np.int32), share.astype(np.float32)


@dataclass(frozen=True)
class PixelLayout:
    """Pictures of any size in pixels (Pixtral).

    The item's arrays are `pixel_values`, float32 [channels, height, width], perhaps in one more
    dimension, and `image_sizes`, int64 [2]: the height and width that are read.
    """

    channels: int
    patch: int
    merge: int
    """Height and width of the squares of patches that become one row."""
    head_size: int
    theta: float = 1e4
    """Base of the rotary positions."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        pixels, size = self._parts(data)
        height, width = size if len(size) == 2 else (0, 0)
        square = self.patch * self.merge
        if (
            pixels.ndim != 3
            or len(pixels) != self.channels
            or not 0 < height <= pixels.shape[1]
            or not 0 < width <= pixels.shape[2]
            or height % square
            or width % square
        ):
            expected = f"{self.channels} channels with sides of multiples of {square} pixels"
            raise refuse_shape(pixels, "pixel_values", expected)
        tokens = (height // self.patch) * (width // self.patch)
        return tokens, tokens // self.merge**2

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        pixels, (height, width) = self._parts(data)
        pixels = pixels[None, :, :height, :width].astype(np.float32, copy=False)
        patches = cut_patches(pixels, self.patch)
        return self._item(patches, height // self.patch, width // self.patch)

    @staticmethod
    def _parts(data: Arrays) -> tuple[NDArray[Any], list[int]]:
        """Return the pixels of a picture, and the height and width that are read."""
        pixels = data["pixel_values"]
        pixels = pixels[0] if pixels.ndim == 4 and len(pixels) == 1 else pixels
        return pixels, [int(n) for n in data["image_sizes"].ravel()]

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        columns = num_tokens // self.merge // self.merge * self.merge
        numbers = self.channels * self.patch**2
        patches = np.zeros((columns * self.merge, numbers), np.float32)
        return self._item(patches, self.merge, columns)

    def _item(self, patches: Floats, height: int, width: int) -> EncoderItem:
        tokens = np.arange(height * width)
        # Even pairs of a head turn with the row, odd ones with the column.
        exponents = np.arange(0, self.head_size, 2, dtype=np.float32) / np.float32(self.head_size)
        speeds = rates(self.theta, exponents)
        return EncoderItem(
            height * width // self.merge**2,
            (np.array([height * width]),),
            numbers={"patches": patches},
            indices={"output_tokens": group_tokens(height, width, self.merge)},
            rotary=axial_rotary(tokens // width, tokens % width, speeds[::2], speeds[1::2]),
        )
