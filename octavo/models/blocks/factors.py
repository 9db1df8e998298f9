"""Factors of the columns of a projection's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class Factors:
    """Factors of the parts of a projection's result."""

    values: tuple[float, ...]
    counts: tuple[int, ...]
    """Number of columns of each part."""

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`; upper bound for all types."""
        return 4 * sum(self.counts)

    def compute(self, dtype: str) -> HostTensor:
        """Return the factor of each column."""
        from octavo.system.tensor import dense, from_numpy

        return dense(from_numpy(np.repeat(self.values, self.counts)), dtype)
