"""Array of a step with the ranges of tokens that see each other in both directions.

Such a range is the rows of a picture (Gemma 3, arXiv:2503.19786), or a whole prompt with pictures
(PaliGemma, arXiv:2407.07726, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest

RANGES = "ranges"
"""Name of the array."""
NO_BEGIN = 2**31 - 1
"""Begin of the range of a token that has none; the end is then 0."""


class _Ranges:
    """Filler: it keeps the ranges of the prompts that have some, by row."""

    def __init__(self, *, widens: bool) -> None:
        self._widens = widens
        self._of_row: dict[int, list[tuple[int, int]]] = {}

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._of_row.pop(row, None)
        found = dict.fromkeys(pair for feature in data.mm_features for pair in feature.ranges)
        if found:
            self._of_row[row] = list(found)

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Do nothing: the ranges do not change."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        out[:] = NO_BEGIN, 0
        if not self._of_row:
            return
        first = 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            for begin, end in self._of_row.get(row, ()):
                low, high = max(begin - start, 0), min(end - start, count)
                if low < high:
                    out[first + low : first + high] = begin if self._widens else NO_BEGIN, end
            first += count


@dataclass(frozen=True)
class RangeArray:
    """A `StepArray`: begin and end of each token's range, int32 [tokens, 2].

    See `AttentionParams`.
    """

    widens: bool
    """True if a token sees its range also beyond a sliding window; False: begins are `NO_BEGIN`."""
    name: str = RANGES
    dims: tuple[str | int, ...] = ("tokens", 2)
    dtype: str = "int32"

    def make_filler(self, max_num_rows: int) -> _Ranges:
        """Implement `StepArray`."""
        return _Ranges(widens=self.widens)
