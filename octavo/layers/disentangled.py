"""Products of disentangled attention (DeBERTa, He et al., arXiv:2006.03654, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.attention.base import DistanceProducts
from octavo.kernels.base import Ops
from octavo.kernels.weights import PackedWeight
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Disentangled:
    """Products of queries and keys with vectors of distances."""

    ops: Ops
    columns: Tensor
    """Column of each distance; see `DistanceProducts`."""
    keys: PackedWeight | None
    """Vectors that multiply queries, [num_heads * columns, head_size]; None: there are none."""
    queries: PackedWeight | None
    """Vectors that multiply keys, of the same shape."""

    def __call__(self, query: Tensor, key: Tensor) -> DistanceProducts:
        """Return the products of queries and keys [T, num_heads, head_size]."""
        return DistanceProducts(
            self.columns, self._multiply(query, self.keys), self._multiply(key, self.queries)
        )

    def _multiply(self, x: Tensor, vectors: PackedWeight | None) -> Tensor | None:
        return None if vectors is None else self.ops.head_linear(x, vectors, x.shape[1])
