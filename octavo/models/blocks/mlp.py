"""Specification of the feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.mlp import MLP
    from octavo.models.blocks.base import Parts

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]


@dataclass(frozen=True)
class MLPSpec(BlockSpec):
    """Feed-forward block: down(act(up(x))), or down(act(gate(x)) * up(x))."""

    up: LinearSpec
    """Projection up; if gated: gate and up, stacked."""
    down: LinearSpec
    activation: Activation
    gated: bool
    alphas: tuple[str, str] | None = None
    """Names of the parameters of xIELU in the checkpoint, without the layer's prefix."""
    layer_input: int | None = None
    """Index in `StepContext.layer_inputs` of a factor of the inner values (Gemma 4)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the projection up, then those of the projection down."""
        yield from self.up.weights(names.of("gate_up_proj" if self.gated else "up_proj"))
        if self.alphas is not None:
            sources = tuple(Source(names.checkpoint + name, (1,)) for name in self.alphas)
            yield Weight(f"{names.own}alphas", "vector", (2,), sources)
        yield from self.down.weights(names.of("down_proj"))

    def split(self, rank: Rank) -> MLPSpec:
        """Return the block that computes a rank's inner columns, and its part of the result.

        From the inner columns of all ranks, the rank computes some columns of the result. With
        `Rank.reduces`, it computes all columns from its own inner columns only, and the ranks sum
        their results.
        """
        down = self.down
        part = begin, end = rank.share(down.inputs)
        gate_up = (part, (self.down.inputs + begin, self.down.inputs + end))
        return replace(
            self,
            up=self.up.split(*(gate_up if self.gated else (part,))),
            down=down.split_inputs(part, rank)
            if rank.reduces
            else down.split(rank.share(down.outputs)),
        )

    def build(self, parts: Parts, caches: tuple[int, ...]) -> MLP:
        """Implement `BlockSpec`."""
        from octavo.layers.mlp import MLP, get_activation

        result = "feed_forward" if self.layer_input is None else "layer_input"
        columns, part = None, slice(*(self.up.parts or ((None, None),))[0])
        if self.down.parts is not None:
            assert self.up.parts is not None
            columns = parts.columns("inner", self.down.inputs, self.up.parts[0])
        return MLP(
            self.up.build(parts.of("gate_up_proj" if self.gated else "up_proj")),
            get_activation(
                parts.ops,
                self.activation,
                self.gated,
                None if self.alphas is None else parts.tensor("alphas"),
            ),
            self.down.build(parts.of("down_proj"), result),
            columns,
            None if self.layer_input is None else (self.layer_input, part),
        )
