"""Specification of the convolution of a conformer's layer (Phi-4's sounds)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.models.blocks.base import BlockSpec, Table
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.light_conv import NoState
from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.conformer_conv import ConformerConv
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class ConformerConvSpec(BlockSpec):
    """Convolution over the tokens of a segment: out(silu(mix(conv((a + c) * silu(b + d))))).

    One projection computes a and b, and c and d are learned vectors. The arrays of a run are
    `no_source`, int32 [segments], and `no_slots`, int32 [T], all -1: a segment is always whole, so
    the convolution has no state. Each rank computes all of it.
    """

    in_proj: LinearSpec
    """Projection to all a and all b."""
    vectors: tuple[str, str]
    """Tensors [1, size, 1] with c and d."""
    conv: ConvSpec
    mix: LinearSpec
    out_proj: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.in_proj.weights(names.of("in_proj"))
        size = self.conv.channels
        sources = tuple(
            Source(f"{names.checkpoint}{name}", (1, size, 1), "flat") for name in self.vectors
        )
        yield Weight(f"{names.own}vectors", "vector", (2 * size,), sources)
        yield from self.conv.weights(names.of("conv"))
        yield from self.mix.weights(names.of("mix"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def tables(self) -> tuple[Table, ...]:
        """Return the memory of the state."""
        return (self._no_state,)

    @property
    def _no_state(self) -> NoState:
        rows, size = self.conv.state_shape
        return NoState(rows * size)

    def split(self, rank: Rank) -> ConformerConvSpec:
        """Return the whole block."""
        return self

    def build(self, parts: Parts, caches: tuple[int, ...]) -> ConformerConv:
        """Implement `BlockSpec`."""
        from octavo.layers.conformer_conv import ConformerConv
        from octavo.system.tensor import full

        table = self._no_state
        return ConformerConv(
            parts.ops,
            self.in_proj.build(parts.of("in_proj")),
            parts.tensor("vectors"),
            self.conv.build(parts.of("conv")),
            self.mix.build(parts.of("mix")),
            self.out_proj.build(parts.of("out_proj")),
            parts.table(table, lambda: full((1, table.size), 0.0, "float32")),
        )
