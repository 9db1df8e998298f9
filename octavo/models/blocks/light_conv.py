"""Specification of the light convolution of a conformer's layer (Gemma 4's sounds)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models.blocks.base import BlockSpec, Table
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.light_conv import LightConv
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class NoState:
    """State of a convolution whose requests are whole: nothing reads or writes it."""

    size: int

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`."""
        return 4 * self.size


@dataclass(frozen=True)
class LightConvSpec(BlockSpec):
    """Convolution over the tokens of an item: out(silu(norm(conv(a * sigmoid(b))))).

    One projection computes a and b (Conformer, arXiv:2005.08100, section 2.2). The arrays of a run
    are `no_source`, int32 [items], and `no_slots`, int32 [T], all -1: an item is always whole, so
    the convolution has no state. Each rank computes all of it.
    """

    in_proj: LinearSpec
    """Projection to all a and all b."""
    conv: ConvSpec
    norm: RMSNormSpec
    out_proj: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.conv.weights(names.of("conv"))
        yield from self.norm.weights(names.of("norm"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def tables(self) -> tuple[Table, ...]:
        """Return the memory of the state."""
        return (self._no_state,)

    @property
    def _no_state(self) -> NoState:
        rows, size = self.conv.state_shape
        return NoState(rows * size)

    def split(self, rank: Rank) -> LightConvSpec:
        """Return the whole block."""
        return self

    def build(self, parts: Parts, caches: tuple[int, ...]) -> LightConv:
        """Implement `BlockSpec`."""
        from octavo.layers.light_conv import LightConv
        from octavo.system.tensor import full

        table = self._no_state
        return LightConv(
            parts.ops,
            self.in_proj.build(parts.of("in_proj")),
            self.conv.build(parts.of("conv")),
            self.norm.build(parts.of("norm")),
            self.out_proj.build(parts.of("out_proj")),
            parts.table(table, lambda: full((1, table.size), 0.0, "float32")),
        )
