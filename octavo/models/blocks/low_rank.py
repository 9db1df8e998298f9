"""Specification of a projection through a low rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.low_rank import LowRank
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class LowRankSpec:
    """Projection to a low rank, an activation, and a projection from it."""

    down: LinearSpec
    up: LinearSpec
    activation: Literal["none", "tanh", "sigmoid"] = "none"

    def split(self, part: tuple[int, int]) -> LowRankSpec:
        """Return the projection to some outputs (begin, end)."""
        return replace(self, up=self.up.split(part))

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of both projections."""
        yield from self.down.weights(names.of("down"))
        yield from self.up.weights(names.of("up"))

    def build(self, parts: Parts) -> LowRank:
        """Return the live projection."""
        from octavo.layers.low_rank import LowRank

        ops = parts.ops
        functions: dict[str, Any] = {
            "none": None,
            "tanh": lambda x: ops.soft_cap_(x, 1.0),
            "sigmoid": lambda x: ops.sigmoid(x, x),
        }
        down, up = (
            linear.build(parts.of(n)) for n, linear in (("down", self.down), ("up", self.up))
        )
        return LowRank(down, functions[self.activation], up)
