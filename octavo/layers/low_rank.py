"""Projection through a low rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.layers.linear import Linear
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class LowRank:
    """Projection to a low rank, an activation, and a projection from it."""

    down: Linear
    activation: Callable[[Tensor], object] | None
    """Function that changes [T, rank] in place."""
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, hidden_size] to [T, outputs]."""
        inner = self.down(x)
        if self.activation is not None:
            self.activation(inner)
        return self.up(inner)
