"""The feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.mlp import MLP
    from octavo.models.blocks.base import Parts

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class MLPSpec:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    up: LinearSpec
    """Gated: gate and up, stacked."""
    down: LinearSpec
    activation: Activation
    gated: bool

    def weights(self, names: Names) -> Iterator[Weight]:
        """Up, then down."""
        yield from self.up.weights(names.of("gate_up_proj" if self.gated else "up_proj"))
        yield from self.down.weights(names.of("down_proj"))

    def build(self, parts: Parts) -> MLP:
        """The live block."""
        from octavo.layers.mlp import MLP, get_activation

        return MLP(
            self.up.build(parts.of("gate_up_proj" if self.gated else "up_proj")),
            get_activation(parts.ops, self.activation, self.gated),
            self.down.build(parts.of("down_proj")),
        )
