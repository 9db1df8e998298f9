"""Pictures as a whole and in tiles with bars that no token sees: Phi-4 multimodal.

Source: `Phi4MultimodalImageEmbedding` of transformers, and Abouelenin et al., arXiv:2503.01743,
section 2.2. The last tiles of a line and of a column may have bars. A row of the encoder is the
mean of a square of patches; a learned vector ends each line of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.models.blocks.encoder_input import Arrays, EncoderItem, LongArray
from octavo.models.towers.pixels import Floats, cut_patches, refuse_shape

MAX_TILES = 36
"""Most tiles of a picture, without the whole picture."""

_LINE_END, _WHOLE = 0, 1
"""Rows of the table of separators."""


@dataclass(frozen=True)
class BarredTile:
    """Part of a tile that is read, as patches.

    Args:
        side: patches of a side of a tile, an even number.
        seen: rows and columns of patches that tokens see, from the upper left corner.
    """

    side: int
    seen: tuple[int, int]

    @property
    def read(self) -> tuple[int, int]:
        """Rows and columns of patches in squares of 2 x 2 that have a seen patch."""
        rows, columns = self.seen
        return rows + rows % 2, columns + columns % 2

    @property
    def order(self) -> LongArray:
        """Patches of the tile in the order of the tokens, those that are seen first: int64 [T]."""
        (seen_rows, seen_columns), (rows, columns) = self.seen, self.read
        row, column = (axis.ravel() for axis in np.mgrid[:rows, :columns])
        hidden = (row >= seen_rows) | (column >= seen_columns)
        patches: LongArray = row * self.side + column
        return patches[np.argsort(hidden, kind="stable")]

    @property
    def places(self) -> NDArray[np.int32]:
        """Learned position of each patch of the tile, int32 [side * side].

        Those of the seen patches are spread over the whole grid of positions, whatever their
        number; unseen patches have the first one.
        """
        places = np.zeros((self.side, self.side), np.int32)
        rows, columns = (_spread(count, self.side) for count in self.seen)
        places[: len(rows), : len(columns)] = rows[:, None] * self.side + columns
        return places.ravel()


def _spread(count: int, side: int) -> NDArray[np.int32]:
    """Return the position of each of `count` patches of an axis, on a grid of `side` positions.

    Fractions have the rounding of transformers, in float32.
    """
    step = np.float32(1) / np.float32(count)
    at = np.minimum(np.arange(count, dtype=np.float32) * step, np.float32(1 - 1e-6))
    # As torch.arange(1 / side, 1, 1 / side) rounds them.
    edges = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    places: NDArray[np.int32] = np.searchsorted(edges, at, "right").astype(np.int32)
    return places


@dataclass(frozen=True)
class HDLayout:
    """Pictures as a whole and in tiles, with bars at the right and at the bottom.

    The arrays of an item are `image_pixel_values`, float32 [1 + tiles, channels, size, size], the
    whole picture first and then the tiles row by row, `image_sizes`, int64 [2], height and width of
    the tiles together in pixels, and `seen_patches`, int64 [2], rows and columns of patches in
    front of the bars. The rows are those of the tiles together, line by line and without the bars,
    and those of the whole picture; a learned vector ends each line, and another one precedes the
    whole picture. A row of patches is the mean of a square of 2 x 2.
    """

    channels: int
    size: int
    """Height and width of a tile in pixels."""
    patch: int
    has_class: bool = False

    @property
    def side(self) -> int:
        """Number of patches of a side of a tile."""
        return self.size // self.patch

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a whole tile."""
        return self.side**2

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.side**2

    def tiles(self, grid: tuple[int, int], seen: tuple[int, int]) -> list[BarredTile | None]:
        """Return the tiles row by row; None: it is all bar, and not read.

        Args:
            grid: rows and columns of tiles.
            seen: rows and columns of patches in front of the bars.
        """
        rows, columns = (
            [min(max(count - i * self.side, 0), self.side) for i in range(tiles)]
            for count, tiles in zip(seen, grid, strict=True)
        )
        return [BarredTile(self.side, (y, x)) if y and x else None for y in rows for x in columns]

    def counts(self, grid: tuple[int, int], seen: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of tokens and of rows of a picture; see `tiles`."""
        tiles = [tile for tile in self.tiles(grid, seen) if tile is not None]
        tokens = self.side**2 + sum(tile.read[0] * tile.read[1] for tile in tiles)
        half, (lines, columns) = self.side // 2, (-(-count // 2) for count in seen)
        return tokens, lines * (columns + 1) + 1 + half * (half + 1)

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        pixels = data["image_pixel_values"]
        size, seen = (
            [int(n) for n in data[name].ravel()] for name in ("image_sizes", "seen_patches")
        )
        shape = self.channels, self.size, self.size
        grid = [n // self.size for n in size]
        if (
            len(size) != 2
            or len(seen) != 2
            or min(grid) < 1
            or [n * self.size for n in grid] != size
            or not all(0 < n <= tiles * self.side for n, tiles in zip(seen, grid, strict=True))
            or pixels.shape != (1 + grid[0] * grid[1], *shape)
        ):
            expected = f"a whole picture and tiles of {list(shape)}, with their image_sizes"
            raise refuse_shape(pixels, "image_pixel_values", expected)
        return self.counts((grid[0], grid[1]), (seen[0], seen[1]))

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        height, width = (int(n) // self.size for n in data["image_sizes"].ravel())
        rows, columns = (int(n) for n in data["seen_patches"].ravel())
        pixels = data["image_pixel_values"].astype(np.float32, copy=False)
        return self._item(pixels, (height, width), (rows, columns))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        count = num_tokens // self.num_tokens - 1
        pixels = np.zeros((1 + count, self.channels, self.size, self.size), np.float32)
        return self._item(pixels, (count, 1), (count * self.side, self.side))

    def _item(self, pixels: Floats, grid: tuple[int, int], seen: tuple[int, int]) -> EncoderItem:
        side = self.side
        whole = BarredTile(side, (side, side))
        patches: list[Floats] = []
        places: list[NDArray[np.int32]] = []
        sizes: list[int] = []
        seen_sizes: list[int] = []
        planes: list[LongArray] = []
        first = 0
        for picture, tile in zip(pixels, [whole, *self.tiles(grid, seen)], strict=True):
            plane = np.full(side**2, -1)
            if tile is not None:
                order = tile.order
                plane[order] = first + np.arange(len(order))
                patches.append(cut_patches(picture[None], self.patch)[order])
                places.append(tile.places[order])
                sizes.append(len(order))
                seen_sizes.append(tile.seen[0] * tile.seen[1])
                first += len(order)
            planes.append(plane.reshape(side, side))
        tiles = np.stack(planes[1:]).reshape(*grid, side, side).transpose(0, 2, 1, 3)
        lines = tiles.reshape(grid[0] * side, -1)[: seen[0] + seen[0] % 2]
        parts = [lines[:, : seen[1] + seen[1] % 2], planes[0]]
        means, ends = zip(*(_squares_with_ends(part) for part in parts), strict=True)
        squares = np.concatenate([means[0], np.zeros((1, 4), np.int64), means[1]])
        separators = np.concatenate([ends[0], [_WHOLE], ends[1]])
        is_mean = (separators < 0)[:, None]
        return EncoderItem(
            len(squares),
            (np.array(sizes),),
            numbers={"patches": np.concatenate(patches)},
            arrays={
                "places": np.concatenate(places)[:, None],
                "shares": np.where(is_mean, np.float32(1 / 4), np.float32(0)).repeat(4, 1),
                "separator_places": np.maximum(separators, 0).astype(np.int32)[:, None],
                "separator_shares": 1 - is_mean.astype(np.float32),
            },
            indices={"averaged_tokens": squares.astype(np.int32)},
            seen=np.array(seen_sizes),
        )


def _squares_with_ends(plane: LongArray) -> tuple[LongArray, LongArray]:
    """Return the four tokens of each row, line by line with an end, and the rows' separators.

    Args:
        plane: tokens, int64 [lines * 2, columns * 2].

    Returns:
        Tokens, int64 [lines * (columns + 1), 4], and separators, int64 of the same length: -1 for
        a mean of tokens.
    """
    lines, columns = plane.shape[0] // 2, plane.shape[1] // 2
    squares = plane.reshape(lines, 2, columns, 2).transpose(0, 2, 1, 3).reshape(lines, columns, 4)
    separators = np.full((lines, columns + 1), -1)
    separators[:, -1] = _LINE_END
    return np.pad(squares, ((0, 0), (0, 1), (0, 0))).reshape(-1, 4), separators.ravel()
