"""Pictures as a whole and in tiles, whose rows end with a learned vector: LLaVA-NeXT, OneVision.

Li et al., "LLaVA-OneVision" (arXiv:2408.03326), section 3.1. A picture is scaled into the
resolution, of a list, that fits it best, and cut into tiles; bars at its edges fill the rest. The
encoder's rows are those of the whole picture, then those of all tiles together, line by line and
without the bars; a learned vector ends each line. Large pictures are shrunk to a limit first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.models.blocks.encoder_input import Arrays, EncoderItem, LongArray
from octavo.models.towers.pixels import Floats, TileLayout, refuse_shape

Size = tuple[int, int]
"""Height and width."""
_MAX_SIDE = 2**16
_SHRINKS_FROM = 1.1
"""Multiple of the limit of a side from which pictures are shrunk."""


def best_resolution(height: int, width: int, resolutions: Sequence[Size]) -> Size:
    """Return the resolution that keeps most pixels of a picture, and of equal ones the smallest."""
    best, most, least_waste = resolutions[0], -1, math.inf
    for resolution in resolutions:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        waste = resolution[0] * resolution[1] - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = resolution, kept, waste
    return best


@dataclass(frozen=True)
class Packing:
    """Lines of rows that the tiles of a picture become.

    Args:
        side: patches of a line of a tile.
        grid: lines and columns of tiles.
        size: height and width of the picture in pixels.
        limit: tiles to whose area larger pictures are shrunk; None: none are.
    """

    side: int
    grid: Size
    size: Size
    limit: int | None = None

    @property
    def bars(self) -> Size:
        """Patches that are cut off at the top and the bottom, and at the left and the right."""
        (height, width), (lines, columns) = self.size, self._patches
        if width / height > columns / lines:
            return (lines - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (lines / height), 7))) // 2

    @property
    def uncut(self) -> Size:
        """Lines and columns before the picture is shrunk."""
        (lines, columns), (top, left) = self._patches, self.bars
        return lines - 2 * top, columns - 2 * left

    @property
    def shape(self) -> Size:
        """Lines and columns of the result, without the vectors that end lines."""
        lines, columns = self.uncut
        if self.limit is None:
            return lines, columns
        ratio = math.sqrt(lines * columns / (self.limit * self.side**2))
        return (int(lines // ratio), int(columns // ratio)) if ratio > _SHRINKS_FROM else self.uncut

    @property
    def num_rows(self) -> int:
        """Number of rows, those of line ends included."""
        lines, columns = self.shape
        return lines * (columns + 1)

    @property
    def _patches(self) -> Size:
        return self.grid[0] * self.side, self.grid[1] * self.side

    def taps(self, tokens: LongArray) -> tuple[LongArray, Floats]:
        """Return the tokens whose sum is each row, line by line, and their factors.

        Args:
            tokens: int64 [tiles, side * side]: tokens of the patches of each tile.

        Returns:
            int64 and float32 [lines, columns, K], with K = 4 if there is a limit, else 1.
        """
        (top, left), (lines, columns), side = self.bars, self.uncut, self.side
        plane = tokens.reshape(*self.grid, side, side).transpose(0, 2, 1, 3).reshape(self._patches)
        plane = plane[top : top + lines, left : left + columns]
        if self.limit is None:
            return plane[:, :, None], np.ones((lines, columns, 1), np.float32)
        return shrink(plane, self.shape)


def shrink(plane: LongArray, shape: Size) -> tuple[LongArray, Floats]:
    """Return four tokens for each place of a smaller plane, and their shares: bilinear.

    The edges of both planes are the same, as in torch.nn.functional.interpolate.

    Args:
        plane: tokens: int64 [lines, columns].
        shape: lines and columns of the smaller plane.

    Returns:
        int64 and float32 [lines, columns, 4].
    """
    places, shares = [], []
    for size, new in zip(plane.shape, shape, strict=True):
        middles = np.arange(new, dtype=np.float32) + np.float32(0.5)
        at = np.maximum(middles * (np.float32(size) / np.float32(new)) - np.float32(0.5), 0)
        low = np.minimum(at.astype(np.int64), size - 1)
        rest = at - low.astype(np.float32)
        places.append(np.stack([low, np.minimum(low + 1, size - 1)]))
        shares.append(np.stack([1 - rest, rest]))
    taps = plane[places[0][:, None, :, None], places[1][None, :, None, :]]
    share = shares[0][:, None, :, None] * shares[1][None, :, None, :]
    order = (2, 3, 0, 1)
    return (
        taps.transpose(order).reshape(*shape, 4),
        share.transpose(order).reshape(*shape, 4).astype(np.float32),
    )


@dataclass(frozen=True)
class AnyresLayout:
    """Pictures as a whole and in tiles; frames of videos.

    The arrays of a picture are `pixel_values`, float32 [1 + tiles, channels, size, size], the whole
    picture first, and `image_sizes`, int64 [2], its height and width. Those of a frame of a video
    are one tile, and `ends_video`, int64 [1]: 1 if a learned vector follows; its rows are those of
    the tile, shrunk to half of its height and width.
    """

    tiles: TileLayout
    resolutions: tuple[Size, ...]
    """Resolutions in pixels: multiples of the size of a tile."""
    limit: int | None = None
    """See `Packing`."""

    @property
    def channels(self) -> int:
        """Number of colors."""
        return self.tiles.channels

    @property
    def patch(self) -> int:
        """Height and width of a patch."""
        return self.tiles.patch

    @property
    def has_class(self) -> bool:
        """See `TileLayout`."""
        return self.tiles.has_class

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a tile."""
        return self.tiles.num_tokens

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.tiles.num_positions

    @property
    def max_tiles(self) -> int:
        """Most tiles of a picture, the whole one included."""
        return 1 + max(height * width for height, width in self.resolutions) // self.tiles.size**2

    @property
    def max_rows(self) -> int:
        """Upper bound of the rows of a picture."""
        side = self.tiles.side
        return side**2 + self._largest_packing(self.max_tiles - 1).num_rows

    @property
    def frame_rows(self) -> Size:
        """Lines and columns of the rows of a frame."""
        return (-(-self.tiles.side // 2),) * 2

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        tokens, _ = self.tiles.sizes(data)
        count = tokens // self.num_tokens
        if "image_sizes" not in data:
            (ends,) = data["ends_video"].tolist()
            if count != 1 or ends not in (0, 1):
                raise refuse_shape(data["pixel_values"], "pixel_values", "frames one by one")
            return tokens, math.prod(self.frame_rows) + ends
        packing = self._packing(data)
        if count != 1 + math.prod(packing.grid):
            expected = f"{1 + math.prod(packing.grid)} tiles of a picture of this size"
            raise refuse_shape(data["pixel_values"], "pixel_values", expected)
        return tokens, self.tiles.side**2 + packing.num_rows

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        item = self.tiles.read(data)
        if "image_sizes" in data:
            return self._packed(item, self._packing(data))
        (ends,) = data["ends_video"].tolist()
        places, shares = shrink(self._tokens(1).reshape(self.tiles.side, -1), self.frame_rows)
        return self._item(item, [(places, shares)], [False] + [True] * ends)

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        count = num_tokens // self.num_tokens - 1
        return self._packed(self.tiles.largest(num_tokens), self._largest_packing(count))

    def packing(self, height: int, width: int) -> Packing:
        """Return the lines of a picture with this size in pixels."""
        best = best_resolution(height, width, self.resolutions)
        grid = best[0] // self.tiles.size, best[1] // self.tiles.size
        return Packing(self.tiles.side, grid, (height, width), self.limit)

    def _largest_packing(self, count: int) -> Packing:
        """Return the lines of at most `count` tiles that have most rows."""
        side = self.tiles.size
        if self.limit is not None:  # a picture that is just not shrunk has most rows
            count = min(count, math.ceil(self.limit * _SHRINKS_FROM**2))
        return Packing(self.tiles.side, (count, 1), (count * side, side))

    def _packing(self, data: Arrays) -> Packing:
        size = [int(n) for n in data["image_sizes"].ravel()]
        if len(size) != 2 or not all(0 < n <= _MAX_SIDE for n in size):
            raise RequestError(f"image_sizes is {size}; give height and width in pixels.")
        return self.packing(size[0], size[1])

    def _tokens(self, count: int) -> LongArray:
        """Return the tokens of the patches of some tiles: int64 [tiles, side * side]."""
        patches = np.arange(self.tiles.side**2) + self.has_class
        return np.arange(count)[:, None] * self.num_tokens + patches

    def _packed(self, item: EncoderItem, packing: Packing) -> EncoderItem:
        tokens = self._tokens(1 + math.prod(packing.grid))
        whole, lines = tokens[0][:, None], packing.taps(tokens[1:])
        parts = [(line, share) for line, share in zip(*lines, strict=True)]
        first = np.ones(whole.shape, np.float32)
        return self._item(item, [(whole, first), *parts], [False] + [True] * len(parts))

    def _item(
        self,
        item: EncoderItem,
        parts: Sequence[tuple[LongArray, Floats]],
        ends: Sequence[bool],
    ) -> EncoderItem:
        """Return an item whose rows are sums of tokens.

        Args:
            item: tokens of the tiles.
            parts: tokens of successive rows, and their factors: [..., at most K].
            ends: True for each part that the learned vector follows; more are vectors alone.
        """
        taps = 1 if self.limit is None else 4
        places: list[LongArray] = []
        shares: list[Floats] = []
        newlines: list[bool] = []
        for i, ends_line in enumerate(ends):
            if i < len(parts):
                where, share = (part.reshape(-1, part.shape[-1]) for part in parts[i])
                rest = ((0, 0), (0, taps - where.shape[1]))
                places.append(np.pad(where, rest))
                shares.append(np.pad(share, rest))
                newlines += [False] * len(where)
            if ends_line:
                places.append(np.zeros((1, taps), np.int64))
                shares.append(np.zeros((1, taps), np.float32))
                newlines.append(True)
        marks = np.array(newlines, np.float32)[:, None]
        indices: dict[str, NDArray[Any]] = {"mixed_tokens": np.concatenate(places).astype(np.int32)}
        arrays: dict[str, NDArray[Any]] = {
            "mix_shares": np.concatenate(shares),
            "newlines": marks,
            "newline_places": np.zeros(marks.shape, np.int32),
        }
        return EncoderItem(
            len(marks),
            item.segments,
            numbers=item.numbers,
            arrays={**item.arrays, **arrays},
            indices=indices,
        )
