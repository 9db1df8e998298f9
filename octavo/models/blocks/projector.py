"""Specification of the last part of an encoder: from the tokens of an item to its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec, StandardSpec, build_norm
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.projector import Projector
    from octavo.models.blocks.base import Parts

ProjectorActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True)
class ProjectorSpec:
    """Projection of tokens, or of groups of tokens, to rows.

    The steps are: linear layer and norm of tokens, choice and grouping of tokens, separators, norm
    of groups, linear layers, mixture of rows.
    """

    layers: tuple[tuple[LinearSpec, ProjectorActivation | None], ...]
    """Linear layers, each with the activation of its result."""
    token_norm: NormSpec | StandardSpec | None = None
    norm: NormSpec | None = None
    """Norm of a group."""
    gathers: bool = False
    """True if the indices `output_tokens`, int64 [rows * group], name the tokens of each row in
    turn; False: they are all tokens in order."""
    group: int = 1
    """Number of tokens whose hidden states are joined to one row."""
    averages: int = 1
    """Number of tokens of which a row is the mean. If it is not 1, `averaged_tokens`, int32 [rows,
    averages], are indices of tokens, and `shares`, float32 of the same shape, their factors."""
    separators: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tensors of learned vectors, and their stored shapes, that are added to means of tokens before
    the norm of groups: `separator_places`, int32 [rows, 1], is the index of the vector of each row,
    and `separator_shares`, float32 [rows, 1], its factor."""
    newline: str | None = None
    """Tensor of a learned vector, if rows are mixed: `mixed_tokens`, int32 [rows, K], are the
    results whose sum is a row, `mix_shares`, float32 of the same shape, their factors, and
    `newlines`, float32 [rows, 1], that of the vector. `newline_places`, int32 [rows, 1], is 0."""
    beside: tuple[tuple[LinearSpec, ProjectorActivation | None], ...] = ()
    """Layers of the items beside others, in place of `layers`, which have as many rows. `alone` and
    `beside`, numbers [rows, 1], are 1 for the rows of the one or the other kind of items, else
    0."""
    token_linear: LinearSpec | None = None
    """Linear layer of each token, before its norm (Gemma 4's sounds)."""

    @property
    def is_by_rows(self) -> bool:
        """True if a row depends only on the tokens of its group."""
        return self.averages == 1 and self.newline is None

    @property
    def size(self) -> int:
        """Number of numbers of a row."""
        return self.layers[-1][0].outputs

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of the steps."""
        if self.token_linear is not None:
            yield from self.token_linear.weights(names.of("token_linear"))
        if self.token_norm is not None:
            yield from self.token_norm.weights(names.of("token_norm"))
        if self.separators:
            sources = tuple(Source(name, shape, "flat") for name, shape in self.separators)
            numbers = sum(math.prod(shape) for _, shape in self.separators)
            yield Weight(f"{names.own}separators", "vector", (numbers,), sources)
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        for i, (linear, _) in enumerate(self.layers):
            yield from linear.weights(names.of(f"{i}"))
        for i, (linear, _) in enumerate(self.beside):
            yield from linear.weights(names.of(f"beside.{i}"))
        if self.newline is not None:
            source = Source(self.newline, (self.size,))
            yield Weight(f"{names.own}newline", "vector", (self.size,), (source,))

    def build(self, parts: Parts) -> Projector:
        """Return the live block."""
        from octavo.layers.projector import Projector

        return Projector(
            parts.ops,
            [
                (linear.build(parts.of(f"{i}")), activation)
                for i, (linear, activation) in enumerate(self.layers)
            ],
            [
                (linear.build(parts.of(f"beside.{i}")), activation)
                for i, (linear, activation) in enumerate(self.beside)
            ],
            None
            if self.token_linear is None
            else self.token_linear.build(parts.of("token_linear")),
            build_norm(self.token_norm, parts.of("token_norm")),
            build_norm(self.norm, parts.of("norm")),
            gathers=self.gathers,
            group=self.group,
            averages=self.averages > 1,
            separators=(
                parts.tensor("separators").view(len(self.separators), -1)
                if self.separators
                else None
            ),
            newline=None if self.newline is None else parts.tensor("newline").view(1, -1),
        )
