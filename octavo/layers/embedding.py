"""Embedding of tokens, and of positions where they are learned."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.base import Ops, PackedWeight
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm


class Embedding:
    """From token ids and positions to the first hidden states.

    Args:
        ops: table of operations.
        weight: [vocab_size, embed_size] in the model's dtype; packed where the LM head shares it.
        scale: factor on the embedding, as the model's dtype has it (Gemma), or None.
        project: to the hidden size, where the embedding is narrower (OPT-350m).
        positions: [max_position, hidden_size] to be added, or None.
        norm: applied last (BLOOM).
    """

    __slots__ = ("add", "embedding", "norm", "positions", "project", "scale", "scale_", "weight")

    def __init__(
        self,
        ops: Ops,
        weight: Tensor | PackedWeight,
        *,
        scale: float | None = None,
        project: Linear | None = None,
        positions: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.embedding = ops.embedding
        self.add = ops.add
        self.scale_ = ops.scale_
        self.weight = weight
        self.scale = None if scale is None else torch.tensor(scale, dtype=weight.dtype).item()
        self.project = project
        self.positions = positions
        self.norm = norm

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions [T] int64 -> [T, hidden_size]."""
        x = self.embedding(self.weight, input_ids)
        if self.scale is not None:
            self.scale_(x, self.scale)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = self.add(x, self.embedding(self.positions, positions))
        if self.norm is not None:
            x = self.norm(x)
        return x
