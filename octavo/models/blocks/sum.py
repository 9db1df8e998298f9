"""Specification of the sum of blocks that read the same input (Falcon-H1, Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, LargestStep, Table
from octavo.models.blocks.norm import NormSpec, build_norm
from octavo.models.cache import CacheSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.sum import Sum
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class Term:
    """Block with factors and norms of its input and its result."""

    name: str
    """Name of the block in the names of its weights."""
    block: BlockSpec
    input_factor: float = 1.0
    result_factor: float = 1.0
    norm: NormSpec | None = None
    """Norm of the block's input."""
    out_norm: NormSpec | None = None
    """Norm of the block's result."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the norm, the block, and the norm of its result."""
        own = names.of(self.name)
        if self.norm is not None:
            yield from self.norm.weights(own.of("norm"))
        yield from self.block.weights(own)
        if self.out_norm is not None:
            yield from self.out_norm.weights(own.of("out_norm"))


@dataclass(frozen=True)
class SumSpec(BlockSpec):
    """Sum of blocks of the same input."""

    terms: tuple[Term, ...]

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of all terms."""
        for term in self.terms:
            yield from term.weights(names)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches of all terms."""
        return tuple(cache for term in self.terms for cache in term.block.caches())

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the arrays of all terms."""
        return tuple(array for term in self.terms for array in term.block.arrays())

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of all terms."""
        return tuple(table for term in self.terms for table in term.block.tables())

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the largest bound of a term: the terms run one after the other."""
        return max(term.block.scratch_nbytes(backend, largest) for term in self.terms)

    def split(self, rank: Rank) -> SumSpec:
        """Return the sum of the rank's parts of the terms."""
        return SumSpec(tuple(replace(term, block=term.block.split(rank)) for term in self.terms))

    def split_experts(self, rank: Rank) -> SumSpec:
        """Implement `BlockSpec`."""
        terms = [replace(term, block=term.block.split_experts(rank)) for term in self.terms]
        return SumSpec(tuple(terms))

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Sum:
        """Implement `BlockSpec`."""
        from octavo.layers.sum import LiveTerm, Sum

        live, first = [], 0
        for term in self.terms:
            end = first + len(term.block.caches())
            own = parts.of(term.name)
            live.append(
                LiveTerm(
                    term.block.build(own, caches[first:end]),
                    term.input_factor,
                    term.result_factor,
                    build_norm(term.norm, own.of("norm")),
                    build_norm(term.out_norm, own.of("out_norm")),
                )
            )
            first = end
        return Sum(parts.ops, tuple(live))
