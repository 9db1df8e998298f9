"""Embedding of tokens, and of positions if these are learned."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.layers.adapter import AdaptedEmbedding
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm, RMSNorm
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Embedding:
    """Map from token ids and positions to the first hidden states."""

    ops: Ops
    weight: Tensor | PackedWeight | QuantizedWeight
    """[vocab_size, embed_size]; packed if the LM head shares it, or if it is quantized."""
    scale: float | None = None
    """Factor of the embedding (Gemma), rounded to the model's dtype."""
    scale_given: bool = False
    """True if embeddings that arrive with a prompt still need scaling."""
    project: Linear | None = None
    """Projection to the hidden size, if the embedding is narrower (OPT-350m)."""
    projects_sum: bool = False
    """True if the projection follows the norm (ELECTRA); False: before all other vectors."""
    positions: Tensor | None = None
    """Learned positions [max_position, hidden_size], which are added."""
    token_types: Tensor | None = None
    """Vectors of token types [types, hidden_size], which are added (BERT)."""
    norm: Norm | None = None
    """Norm applied last (BLOOM)."""
    dtype: str | None = None
    """Type of the result of a quantized table."""
    norm_given: bool = True
    """True if embeddings that arrive with a prompt still need the norm."""
    adapted: AdaptedEmbedding | None = None
    """Changes of adapters to the table; None: adapters are off."""
    adapted_types: AdaptedEmbedding | None = None
    """Changes of adapters to `token_types`."""

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Map input_ids [T] int64 to [T, embed_size], the form of prompts' embeddings."""
        x = self.ops.embedding(self.weight, input_ids, self.dtype)
        if self.adapted is not None:
            self.adapted.add(x, input_ids)
        if self.scale is not None and not self.scale_given:
            self.ops.scale_(x, self.scale)
        if self.norm is not None and not self.norm_given:
            x = self.norm(x)
        return x

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        looked_up: Tensor | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Map input_ids, positions and types [T] int64 to [T, hidden_size].

        `looked_up` replaces `look_up(input_ids)`; it is changed in place.
        """
        x = self.look_up(input_ids) if looked_up is None else looked_up
        if self.scale is not None and self.scale_given:
            self.ops.scale_(x, self.scale)
        if self.project is not None and not self.projects_sum:
            x = self.project(x)
        if self.positions is not None:
            x = self.ops.add(x, self.ops.embedding(self.positions, positions))
        if self.token_types is not None:
            assert types is not None
            of_types = self.ops.embedding(self.token_types, types)
            if self.adapted_types is not None:
                self.adapted_types.add(of_types, types)
            x = self.ops.add(x, of_types)
        if self.norm is not None and self.norm_given:
            x = self.norm(x)
        if self.project is not None and self.projects_sum:
            x = self.project(x)
        return x


@dataclass(slots=True)
class LayerInputs:
    """Map from token ids and their embedding to the inputs of each layer."""

    ops: Ops
    weight: Tensor | PackedWeight | QuantizedWeight
    """Table [vocab_size, layers * size]; packed if it is quantized."""
    num_layers: int
    scale: float
    """Factor of the table's rows, rounded to the model's dtype."""
    project: Linear
    """Projection of the embedding to layers * size."""
    norm: RMSNorm
    """Norm of each layer's part of the projection."""
    dtype: str

    def __call__(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Map input_ids [T] int64 and their embedding x [T, hidden_size] to [T, layers, size]."""
        projected = self.project(x)
        of_layers = projected.view(x.shape[0], self.num_layers, -1)
        self.norm(of_layers, of_layers)
        looked_up = self.ops.embedding(self.weight, input_ids, self.dtype)
        self.ops.scale_(looked_up, self.scale)
        self.ops.add(looked_up, projected, looked_up)
        self.ops.scale_(looked_up, 0.5**0.5)
        inputs: Tensor = looked_up.view(x.shape[0], self.num_layers, -1)
        return inputs
