"""Rotary positions with sections for time, height and width (m-RoPE).

Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1. In a text the three positions of a token
are equal. The rows of a picture, or of a video, have the positions of its grid, after those of the
text before it; the text after it continues behind the largest of them. So a token of an answer has
its index in the request plus a constant of the request as its position.

A step brings the cosines and sines of its tokens, which all layers use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers.rope_spec import RopeSpec
from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import MultiModalFeatureSpec, NewRequestData, ScheduledRequest

MROPE = "mrope"
"""Name of the array."""
SECTIONS = 3
"""Time, height and width."""


def mrope_positions(
    features: Iterable[MultiModalFeatureSpec], num_tokens: int
) -> tuple[LongArray, int]:
    """Return the positions of a prompt's tokens.

    Args:
        features: the items of the prompt in order, each with its `grid`.
        num_tokens: number of tokens of the prompt.

    Returns:
        int64 [3, num_tokens], and the difference of position and index after them.
    """
    positions: LongArray = np.empty((SECTIONS, num_tokens), np.int64)
    index = shift = 0
    for feature in features:
        place, grid = feature.mm_position, feature.grid
        assert grid is not None
        assert place.is_embed is None
        positions[:, index : place.offset] = np.arange(index, place.offset) + shift
        rows = np.indices(grid).reshape(SECTIONS, -1)
        rows[0] += feature.time
        following = place.offset + shift
        begin = following
        if feature.follows:  # a part of a video, whose first row has the least positions
            begin = int(positions[1, place.offset - feature.follows])
        positions[:, place.offset : place.end] = rows + begin
        following = max(following, begin + int(rows.max()) + 1)
        shift = following - place.end
        index = place.end
    positions[:, index:] = np.arange(index, num_tokens) + shift
    return positions, shift


def sections_of_pairs(rope: RopeSpec, sections: tuple[int, ...], interleaved: bool) -> LongArray:
    """Return the section of each pair of a head's elements: int64 [rotary_dim / 2].

    Args:
        rope: the rotary positions.
        sections: numbers of pairs of each section.
        interleaved: True if the sections take turns (Qwen3-VL): time, height, width, and so on, as
            far as a section has pairs; pairs that are left over have the time. False: the pairs of
            a section are successive.
    """
    if not interleaved:
        return np.repeat(np.arange(SECTIONS), sections)
    found: LongArray = np.zeros(rope.rotary_dim // 2, np.int64)
    for section in range(1, SECTIONS):
        found[section : sections[section] * SECTIONS : SECTIONS] = section
    return found


class _Table:
    """Filler: it keeps the positions of the prompts with items."""

    def __init__(self, max_num_rows: int, array: MRopeArray) -> None:
        from octavo.layers.rotary import inverse_frequencies

        rope = array.rope
        self._inverse = inverse_frequencies(rope, 0)
        self._factor = np.float32(rope.attention_factor)
        self._sections = sections_of_pairs(rope, array.sections, array.interleaved)
        self._shifts: LongArray = np.zeros(max_num_rows, np.int64)
        """Position minus index of the tokens after all items, by row."""
        self._prompts: dict[int, LongArray] = {}
        """By row, int64 [3, tokens]: positions of the tokens up to the last one of an item."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._shifts[row] = 0
        self._prompts.pop(row, None)
        if data.mm_features:
            end = data.mm_features[-1].mm_position.end
            self._prompts[row], self._shifts[row] = mrope_positions(data.mm_features, end)

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: the positions follow from the index."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        ends = np.cumsum(counts)
        begins = ends - counts
        positions = np.repeat(starts - begins + self._shifts[rows], counts) + np.arange(len(out))
        several: LongArray | None = None
        if self._prompts:
            for row, start, begin, end in zip(
                rows.tolist(), starts.tolist(), begins.tolist(), ends.tolist(), strict=True
            ):
                prompt = self._prompts.get(row)
                if prompt is not None and start < prompt.shape[1]:
                    if several is None:
                        several = np.repeat(positions[None], SECTIONS, axis=0)
                    part = prompt[:, start : start + end - begin]
                    several[:, begin : begin + part.shape[1]] = part
        of_pairs = positions[:, None] if several is None else several[self._sections].T
        # In float32 and float64 as in `build_cos_sin_cache`, so that texts have the same bits.
        angles = (of_pairs.astype(np.float32) * self._inverse).astype(np.float64)
        half = len(self._inverse)
        out[:, :half] = np.cos(angles).astype(np.float32) * self._factor
        out[:, half:] = np.sin(angles).astype(np.float32) * self._factor


@dataclass(frozen=True)
class MRopeArray:
    """A `StepArray` of cosines and sines, float32 [tokens, rotary_dim]."""

    rope: RopeSpec
    sections: tuple[int, ...]
    """Number of pairs of each section."""
    interleaved: bool = False
    """See `sections_of_pairs`."""
    name: str = MROPE
    dtype: str = "float32"

    @property
    def dims(self) -> tuple[str | int, ...]:
        """Implement `StepArray`."""
        return ("tokens", self.rope.rotary_dim)

    def make_filler(self, max_num_rows: int) -> _Table:
        """Implement `StepArray`."""
        return _Table(max_num_rows, self)
