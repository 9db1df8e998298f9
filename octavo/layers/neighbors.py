"""Arrays of a step with the place of the token at some distance of each token, in its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.layers.step_table import LongArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest


@dataclass(frozen=True)
class NeighborArray:
    """A `StepArray` of the tokens at a distance, int64; each text is whole in a step."""

    distance: int
    """Position of the neighbor minus that of the token."""
    part: Literal["index", "inside"]
    """index: place of the neighbor in the step; that of the token itself if the text has none.
    inside: 1 if the text has the neighbor, else 0."""
    dims: tuple[str, ...] = ("tokens",)
    dtype: str = "int64"

    @property
    def name(self) -> str:
        """Implement `StepArray`."""
        return f"neighbor {self.part} {self.distance}"

    def make_filler(self, max_num_rows: int) -> NeighborArray:
        """Implement `StepArray`: there is nothing to remember of a request."""
        return self

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Implement `StepFiller`."""

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Implement `StepFiller`."""

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        """Implement `StepFiller`."""
        ends = np.cumsum(counts)
        own = np.arange(ends[-1] if len(ends) else 0)
        index = own + self.distance
        inside = (index >= np.repeat(ends - counts, counts)) & (index < np.repeat(ends, counts))
        out[:] = inside if self.part == "inside" else np.where(inside, index, own)
