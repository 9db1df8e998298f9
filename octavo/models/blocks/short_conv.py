"""Specification of a gated short convolution (LFM2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.cache import CacheSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.short_conv import ShortConv
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class ShortConvSpec(BlockSpec):
    """Gated short convolution: out(c * conv(b * x)) with b, c and x of one projection."""

    in_proj: LinearSpec
    """Projection to all b, all c and all x."""
    conv: ConvSpec
    out_proj: LinearSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the projection in, the convolution, and the projection out."""
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.conv.weights(names.of("conv"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the convolution's last inputs."""
        return (StateCache((self.conv.state_shape,)),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def split(self, rank: Rank) -> ShortConvSpec:
        """Return the block with a rank's channels, and its part of the result."""
        size, out = self.conv.channels, self.out_proj
        begin, end = part = rank.share(size)
        return replace(
            self,
            in_proj=self.in_proj.split(*((i * size + begin, i * size + end) for i in range(3))),
            conv=self.conv.split(part),
            out_proj=out.split_inputs(part, rank)
            if rank.reduces
            else out.split(rank.share(out.outputs)),
        )

    def build(self, parts: Parts, caches: tuple[int, ...]) -> ShortConv:
        """Implement `BlockSpec`."""
        from octavo.layers.short_conv import ShortConv

        columns = None
        if self.out_proj.parts is not None:
            assert self.conv.parts is not None
            columns = parts.columns("heads", self.conv.channels, self.conv.parts[0])
        return ShortConv(
            parts.ops,
            caches[0],
            self.in_proj.build(parts.of("in_proj")),
            self.conv.build(parts.of("conv")),
            self.out_proj.build(parts.of("out_proj"), "mixer"),
            columns,
        )
