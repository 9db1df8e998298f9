"""Specification of the feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.models.blocks.base import BlockSpec, Table
from octavo.models.blocks.factors import Factors
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.linear import Linear
    from octavo.layers.mlp import MLP
    from octavo.models.blocks.base import Parts
    from octavo.system.tensor import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "quick_gelu"]


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
    inner_norm: RMSNormSpec | None = None
    """Norm of the input of the projection down (BitNet)."""
    layer_input: int | None = None
    """Index of the layer whose `StepContext.layer_inputs` multiply the inner values (Gemma 4)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the projection up, then those of the projection down."""
        yield from self.up.weights(names.of("gate_up_proj" if self.gated else "up_proj"))
        if self.alphas is not None:
            sources = tuple(Source(names.checkpoint + name, (1,)) for name in self.alphas)
            yield Weight(f"{names.own}alphas", "vector", (2,), sources)
        if self.inner_norm is not None:
            yield from self.inner_norm.weights(names.of("inner_norm"))
        yield from self.down.weights(names.of("down_proj"))

    def split(self, rank: Rank) -> MLPSpec:
        """Return the block that computes a rank's inner columns, and its part of the result.

        From the inner columns of all ranks, the rank computes some columns of the result. With
        `Rank.reduces`, unless a norm needs the inner columns of all ranks, it computes all columns
        from its own inner columns only, and the ranks sum their results.
        """
        down = self.down
        part = begin, end = rank.share(down.inputs)
        gate_up = (part, (self.down.inputs + begin, self.down.inputs + end))
        return replace(
            self,
            up=self.up.split(*(gate_up if self.gated else (part,))),
            down=down.split_inputs(part, rank)
            if rank.reduces and self.inner_norm is None
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
            None if self.inner_norm is None else self.inner_norm.build(parts.of("inner_norm")),
            None if self.layer_input is None else (self.layer_input, part),
        )


@dataclass(frozen=True, kw_only=True)
class SparseMLPSpec(MLPSpec):
    """Feed-forward block down(act(cutoff(gate(x))) * up(x)) (Gemma 3n).

    A cutoff makes about the share `sparsity` of the gate's values 0. It is this quantile of a
    normal distribution with the mean and the deviation of the token's values.
    """

    gate: LinearSpec
    """Projection to the gate; `up` is not stacked."""
    sparsity: float

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the gate, then those of the other projections."""
        yield from self.gate.weights(names.of("gate_proj"))
        yield from super().weights(names)

    def split(self, rank: Rank) -> SparseMLPSpec:
        """Return a rank's part; each rank reads the gate's values of all ranks."""
        part = super().split(rank)
        gate = self.gate.split(rank.share(self.down.inputs))
        return replace(self, up=part.up, down=part.down, gate=gate)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> MLP:
        """Implement `BlockSpec`."""
        from octavo.layers.mlp import GATES

        ops, multiplier = parts.ops, NormalDist().inv_cdf(self.sparsity)
        gate, name = self.gate.build(parts.of("gate_proj"), "gate"), GATES[self.activation]
        own = slice(*(self.gate.parts or ((None, None),))[0])

        def activation(up: Linear, x: Tensor, out: Tensor | None) -> Tensor:
            return ops.multiply(up(x), ops.cutoff(gate(x), multiplier)[:, own], name, out)

        return replace(super().build(parts, caches), activation=activation)


@dataclass(frozen=True, kw_only=True)
class ScaledMLPSpec(MLPSpec):
    """Gated feed-forward block down(act(factor * gate(x)) * up(x)) (Falcon-H1)."""

    gate_factor: float

    def tables(self) -> tuple[Table, ...]:
        """Return the factors of gate and up."""
        return (self._factors,)

    @property
    def _factors(self) -> Factors:
        inner = self.up.outputs // 2
        return Factors((self.gate_factor, 1.0), (inner, inner))

    def build(self, parts: Parts, caches: tuple[int, ...]) -> MLP:
        """Implement `BlockSpec`."""
        from octavo.layers.mlp import GATES

        ops, name, table = parts.ops, GATES[self.activation], self._factors
        factors = parts.table(table, lambda: table.compute(parts.dtype))

        def activation(up: Linear, x: Tensor, out: Tensor | None) -> Tensor:
            gate_up = up(x)
            return ops.act_and_mul(ops.multiply(gate_up, factors, out=gate_up), name, out)

        return replace(super().build(parts, caches), activation=activation)
