"""Division of pictures into patches: the arrays that towers read."""

from __future__ import annotations

from dataclasses import dataclass

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

    Squares follow each other row by row, and so do the patches of a square.
    """
    tokens = np.arange(height * width).reshape(height // group, group, width // group, group)
    return tokens.transpose(0, 2, 1, 3).ravel()


@dataclass(frozen=True)
class PixelLayout:
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
    group: int = 1
    """Height and width of the squares of patches that become one row."""
    averages: bool = False
    """True if a row is the mean of its square."""
    bias_row: bool = False
    """True if the last row of the table is the bias of the projection: only patches have it."""

    @property
    def side(self) -> int:
        """Number of patches of a row, and of rows."""
        return self.size // self.patch

    @property
    def rows(self) -> int:
        """Number of rows of a picture."""
        return (self.side // self.group) ** 2

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        pixels = data["pixel_values"]
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        shape = self.channels, self.size, self.size
        if pixels.ndim != 4 or pixels.shape[1:] != shape or not len(pixels):
            raise RequestError(
                f"pixel_values has shape {list(pixels.shape)}, and the model reads pictures of "
                f"{list(shape)}; prepare the picture with the model's own processor."
            )
        side = self.side * self.patch
        return self._item(cut_patches(pixels[:, :, :side, :side].astype(np.float32), self.patch))

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        count = num_tokens // (self.side**2 + self.has_class)
        numbers = self.channels * self.patch**2
        return self._item(np.zeros((count * self.side**2, numbers), np.float32))

    def _item(self, patches: Floats) -> EncoderItem:
        area, first = self.side**2, int(self.has_class)
        count, tokens = len(patches) // area, area + first
        positions = np.arange(first, tokens)
        arrays: dict[str, NDArray[np.int32] | Floats] = {}
        starts = np.arange(count)[:, None] * tokens + first
        chosen = starts + group_tokens(self.side, self.side, self.group)
        places = np.tile(positions, count)[:, None]
        if self.has_class:
            with_class = np.zeros((count, tokens, patches.shape[1]), np.float32)
            with_class[:, 1:] = patches.reshape(count, area, -1)
            patches = with_class.reshape(count * tokens, -1)
            # Position 0 and the class vector, or another position and the bias.
            own = np.stack([np.arange(tokens), np.full(tokens, tokens + self.bias_row)], 1)
            own[0, 1] = tokens
            shares = np.ones((tokens, 2), np.float32)
            shares[1:, 1] = self.bias_row
            if not self.bias_row:
                own[1:, 1] = 0
            places = np.tile(own, (count, 1))
            arrays["weights"] = np.tile(shares, (count, 1))
        arrays["places"] = places.astype(np.int32)
        indices: dict[str, NDArray[np.int32] | LongArray] = {}
        if self.averages:
            squares = chosen.reshape(-1, self.group**2).astype(np.int32)
            indices["averaged_tokens"] = squares
            arrays["shares"] = np.full(squares.shape, 1 / self.group**2, np.float32)
        elif self.group > 1 or self.has_class:
            indices["output_tokens"] = chosen.ravel()
        return EncoderItem(
            count * self.rows,
            (np.full(count, tokens),),
            numbers={"patches": patches},
            arrays=arrays,
            indices=indices,
        )
