"""Interface of the operations on logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.system.tensor import Tensor

LongArray = NDArray[np.int64]


SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("position", np.uint32),
        ("stream", np.uint32),
        ("top_k", np.int64),
    ]
)
"""Parameters of sampling a token from a row of logits; SamplingRow in csrc/sampling_args.h.

- temperature: 0 selects the first of the largest.
- min_p: in [0, 1]; 0 keeps all.
- top_p: in (0, 1]; 1 keeps all.
- seed, position, stream: select the random numbers, one for each token of the vocabulary.
- top_k: 0 keeps all.
"""


class LogitOps(Protocol):
    """Operations on logits; see `Ops`."""

    def softmax(self, x: Tensor) -> Tensor:
        """Return the softmax of float32 rows [M, V]."""
        ...

    def log_softmax(self, x: Tensor) -> Tensor:
        """Return the logarithm of the softmax of float32 rows [M, V]."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the largest number of each float32 row [M, V]: int64 [M].

        Among equals this is the lowest index. NaN is ignored; a row of NaN yields 0.
        """
        ...

    def row_max(self, x: Tensor) -> Tensor:
        """Return the maximum of each float32 row [M, V]: float32 [M]; NaN where a row has one."""
        ...

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Sample one token from each float32 row [M, V]: int64 [M]; -1 without a finite maximum.

        `params`: `SAMPLING_ROW` [M], dense.

        Each token that the filters keep arrives at -log(u) / weight, u being the token's random
        number (`reference.token_numbers`). The result is the first to arrive, the lowest id among
        equals. So each token is drawn with a probability proportional to its weight. Where two
        distributions are alike, the same numbers mostly draw the same token (the Gumbel-max trick:
        C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", 2014, section 2).

        A token's weight is the integer floor(2**40 * exp((logit - max) / temperature)), so that
        sums are exact in any order. The filters are min-p, then top-k, then top-p of the rest, as
        in vLLM. They rank tokens by value descending, then by id ascending, and each keeps a prefix
        of the ranking.
        """
        ...

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Set the logits of tokens that the bitmask forbids to -inf, in place.

        Args:
            x: float32 [M, V], dense.
            bitmask: int32 [G, ceil(V / 32)]; bit b of word w is 1 if token 32 w + b is allowed.
            rows: int64 [G], the row of x for each row of the bitmask; no duplicates.
        """
        ...

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each float32 row [M, V] in order: values, int64 indices [M, k].

        Fast if k is small.

        Equals are ordered by index; NaN counts as -inf.
        """
        ...

    def gather(self, x: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the numbers of x, float32 [M, V], at `ids` [M, k] of each row: float32 [M, k]."""
        ...

    def ranks(self, x: Tensor, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of number `ids` [M] in each float32 row [M, V]: int64 [M], from 1 on.

        Rows are ranked by value descending, then by index ascending.
        """
        ...

    def set_at_(self, x: Tensor, rows: LongArray, columns: LongArray | None, value: float) -> None:
        """Set elements (rows[i], columns[i]) of x [M, V], or whole rows, to a number."""
        ...

    def add_at_(
        self, x: Tensor, rows: LongArray, columns: LongArray, values: NDArray[np.float32]
    ) -> None:
        """Add values [E] to elements (rows[i], columns[i]) of float32 x [M, V], all distinct."""
        ...

    def penalize_(
        self,
        x: Tensor,
        rows: LongArray,
        columns: LongArray,
        counts: NDArray[np.float32],
        penalties: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        """Apply penalties to elements (rows[i], columns[i]) of float32 x [M, V], all distinct.

        Args:
            x: logits.
            rows: int64 [E].
            columns: int64 [E].
            counts: float32 [E], number of times that the token was generated.
            penalties: float32 [E] each: repetition (divides positive logits, multiplies others),
                frequency (subtracted for each count), and presence (subtracted if the count is
                above 0).
        """
        ...
