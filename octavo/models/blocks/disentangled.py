"""Specification of disentangled attention (DeBERTa, He et al., arXiv:2006.03654, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.checkpoints.base import Source
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.weights import Names, Weight
from octavo.quantization.dequantized import as_numbers
from octavo.quantization.projected import ProjectedTable, Sinusoids

if TYPE_CHECKING:
    from octavo.layers.disentangled import Disentangled
    from octavo.models.blocks.base import Parts
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class Distances:
    """Row of each distance in a table: a `Table` with the columns of `DistanceProducts`.

    Half of the rows are for positions after the query, and half for those up to it. A distance of
    less than half of `buckets` has a row of its own; longer ones share rows, in logarithmic steps.
    """

    longest: int
    """Distance from which on all distances have the same row."""
    buckets: int | None = None
    """Half of the number of rows; None: each distance has its own row."""

    @property
    def rows(self) -> int:
        """Number of the table's rows."""
        return 2 * (self.buckets or self.longest)

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`."""
        return 4 * (2 * self.longest + 1)

    def compute(self) -> HostTensor:
        """Return the row of each distance from -`longest` to `longest`: int32."""
        from octavo.system.tensor import from_numpy

        before = -np.arange(-self.longest, self.longest + 1)
        bucket = before
        if self.buckets is not None:
            middle = self.buckets // 2
            # In float32, as transformers computes it: some distances are at the edge of a bucket.
            size = np.maximum(np.abs(before), middle).astype(np.float32) / np.float32(middle)
            steps = np.log(size) / np.log(np.float32((self.longest - 1) / middle))
            large = np.ceil(steps * np.float32(middle - 1)).astype(np.int64) + middle
            bucket = np.where(np.abs(before) <= middle, before, np.sign(before) * large)
        half = self.rows // 2
        return from_numpy(np.clip(bucket + half, 0, self.rows - 1).astype(np.int32))


@dataclass(frozen=True)
class DisentangledSpec:
    """Products of queries and keys with vectors of distances.

    The vectors are projections of a table that all layers share. They do not depend on a text, so
    they are computed once, while loading, and only the products remain for a step.
    """

    table: str | Sinusoids
    """Module of the table in the checkpoint, without the prefix of a layer; or a table that is
    computed (Gemma 4's sounds)."""
    norm: LayerNormSpec | None
    """Norm of the table's rows."""
    distances: Distances
    keys: LinearSpec | None
    """Projection to the vectors that multiply queries; None: queries are not multiplied."""
    queries: LinearSpec | None
    """Projection to the vectors that multiply keys; None: keys are not multiplied."""
    head_size: int

    def split(self, first: int, end: int) -> DisentangledSpec:
        """Return the part for the heads from `first` to `end`."""
        part = first * self.head_size, end * self.head_size
        keys, queries = (
            None if proj is None else proj.split(part) for proj in (self.keys, self.queries)
        )
        return replace(self, keys=keys, queries=queries)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the vectors of all heads, for `Ops.head_linear`."""
        for name, proj in (("distance_keys", self.keys), ("distance_queries", self.queries)):
            if proj is not None:
                yield self._vectors(proj, names.of(name))

    def _vectors(self, proj: LinearSpec, names: Names) -> Weight:
        plain, rows = as_numbers(proj.forms), self.distances.rows
        weight, *bias = replace(proj, forms=(plain,)).weights(names)
        sources = [*weight.sources, *(source for each in bias for source in each.sources)]
        computed = self.table if isinstance(self.table, Sinusoids) else None
        if computed is None:
            sources.append(Source(f"{self.table}.weight", (rows, proj.inputs)))
        if self.norm is not None:
            sources += [source for each in self.norm.weights(Names()) for source in each.sources]
        eps = None if self.norm is None else self.norm.eps
        whole = proj.whole_outputs // self.head_size * rows
        return replace(
            weight,
            shape=(proj.outputs // self.head_size * rows, self.head_size),
            sources=tuple(sources),
            whole=None if proj.parts is None else whole,
            form=ProjectedTable(plain, self.head_size, bool(bias), eps, computed),
        )

    def build(self, parts: Parts) -> Disentangled:
        """Return the live block."""
        from octavo.kernels.weights import PackedWeight
        from octavo.layers.disentangled import Disentangled

        vectors = []
        for name, proj in (("distance_keys", self.keys), ("distance_queries", self.queries)):
            weight = None if proj is None else parts.of(name).linear("weight")
            assert weight is None or isinstance(weight, PackedWeight)
            vectors.append(weight)
        columns = parts.table(self.distances, self.distances.compute)
        return Disentangled(parts.ops, columns, *vectors)
