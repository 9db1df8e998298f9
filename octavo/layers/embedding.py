"""Embedding of tokens, and of positions where they are learned."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm


class Embedding:
    """From token ids and positions to the first hidden states.

    Args:
        ops: table of operations.
        weight: [vocab_size, embed_size] in the model's dtype.
        scale: factor on the embedding, rounded to the model's dtype (Gemma), or None.
        project: to the hidden size, where the embedding is narrower (OPT-350m).
        positions: [max_position, hidden_size] to be added, or None.
        norm: applied last (BLOOM).
    """

    __slots__ = ("embedding", "norm", "positions", "project", "scale", "weight")

    def __init__(
        self,
        ops: Ops,
        weight: Tensor,
        *,
        scale: float | None = None,
        project: Linear | None = None,
        positions: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.embedding = ops.embedding
        self.weight = weight
        self.scale = None if scale is None else weight.new_tensor(scale).item()
        self.project = project
        self.positions = positions
        self.norm = norm

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions [T] int64 -> [T, hidden_size]."""
        x = self.embedding(self.weight, input_ids)
        if self.scale is not None:
            x.mul_(self.scale)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x.add_(self.embedding(self.positions, positions))
        if self.norm is not None:
            x = self.norm(x)
        return x
