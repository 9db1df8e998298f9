"""EAGLE heads, ready to run: EAGLE (Li et al., 2024) and EAGLE-3 (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.layer import SequentialLayer
from octavo.layers.step import StepContext
from octavo.models.base import Model
from octavo.models.blocks.base import Parts
from octavo.models.blocks.norm import build_norm
from octavo.models.heads import EagleSpec, LMHeadSpec
from octavo.models.spec import ModelSpec


class EagleModel:
    """Model that guesses the next hidden state from a token's state and the next token's embedding.

    It differs from `Model` in two points: it computes from the `inputs` that `fill` has set, and
    `head` selects hidden states, which `guess` turns into logits.

    Args:
        spec: the head.
        parts: the loaded weights and operations.
    """

    inputs: Tensor
    """Tensor of `input_shape`; it must be set before any step is computed or recorded."""

    def __init__(self, spec: EagleSpec, parts: Parts) -> None:
        self.spec: ModelSpec = spec
        self.kept_layers = spec.kept_layers
        """Layers of the target with the hidden states that `combine` uses."""
        self.device = parts.device
        layer = spec.layers[0].build(parts.of("layers.0"), 0)
        assert isinstance(layer, SequentialLayer)
        self._layer = layer
        self._fc = spec.fc.build(parts.of("fc"))
        self._ops = parts.ops
        self.dtype = parts.tensor("layers.0.feed_forward_norm.weight").dtype

    def input_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape of `inputs` for steps of `num_tokens` tokens."""
        return (num_tokens, 2 * self.spec.hidden_size)

    def combine(self, hidden: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """Return the target's hidden states in the form that `fill` accepts.

        Args:
            hidden: [T, hidden_size], the input of the target's LM head.
            kept: hidden states after each of `kept_layers`, of the same shape.
        """
        return hidden

    def fill(self, embedding: Tensor, hidden: Tensor) -> None:
        """Set the inputs of the next step.

        Args:
            embedding: [T, hidden_size] of the tokens after those of the hidden states.
            hidden: [T, hidden_size], from `combine` or guessed.
        """
        tokens, size = hidden.shape
        self.inputs[:tokens, :size] = embedding
        self.inputs[:tokens, size:] = hidden

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Return [T, hidden_size], guesses of the next tokens' hidden states."""
        x = self._fc(self.inputs[: len(input_ids)])
        x, residual = self._layer(x, None, step)
        assert residual is not None
        return self._ops.add(x, residual)

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the rows int64 [M] of guesses [T, hidden_size]."""
        assert rows is not None
        return self._ops.embedding(hidden, rows)

    def guess(self, hidden: Tensor, target: Model | LMHead) -> Tensor:
        """Return the logits float32 [R, vocab_size] of guessed hidden states [R, hidden_size].

        `target` is the model with the head that computes them.
        """
        return target.head(hidden)


class LMHead:
    """Whole LM head of the target.

    Args:
        spec: the head.
        parts: the loaded weights.
    """

    def __init__(self, spec: LMHeadSpec, parts: Parts) -> None:
        self.head = spec.head.build(parts)


class Eagle3Model(EagleModel):
    """EAGLE-3: uses hidden states of three layers of the target, and has its own norms and LM head.

    Args:
        spec: the head.
        parts: the loaded weights and operations.
    """

    def __init__(self, spec: EagleSpec, parts: Parts) -> None:
        super().__init__(spec, parts)
        assert spec.embed_norm is not None
        assert spec.hidden_norm is not None
        self._embed_norm = spec.embed_norm.build(parts.of("embed_norm"))
        self._hidden_norm = spec.hidden_norm.build(parts.of("hidden_norm"))
        self._norm = build_norm(spec.head.norm, parts.of("norm"))
        self._lm_head = spec.head.build(parts)
        self._token_ids = torch.arange(spec.num_draft_tokens)

    def set_offsets(self, d2t: Tensor) -> None:
        """Set the map from the head's vocabulary to the target's vocabulary.

        Args:
            d2t: int64 [num_draft_tokens], added to the head's token ids.

        Raises:
            ModelError: the results are no tokens of the target.
        """
        count, vocab_size = len(self._token_ids), self.spec.vocab_size
        if d2t.shape != (count,) or d2t.is_floating_point():
            raise ModelError(
                f"d2t of the EAGLE-3 head must be {count} integers, draft_vocab_size of config.json"
            )
        self._token_ids = torch.arange(count) + d2t.to(torch.int64)
        if self._token_ids.min() < 0 or self._token_ids.max() >= vocab_size:
            raise ModelError(f"d2t of the EAGLE-3 head names tokens beyond {vocab_size}.")

    def input_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape: embeddings, then hidden states."""
        return (2, num_tokens, self.spec.hidden_size)

    def combine(self, hidden: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """Implement `EagleModel`."""
        return self._fc(torch.cat(list(kept), dim=1))

    def fill(self, embedding: Tensor, hidden: Tensor) -> None:
        """Implement `EagleModel`."""
        self.inputs[0, : len(hidden)] = embedding
        self.inputs[1, : len(hidden)] = hidden

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Implement `EagleModel`."""
        tokens, size, ops = len(input_ids), self.spec.hidden_size, self._ops
        embedding, hidden = self.inputs[0, :tokens], self.inputs[1, :tokens]
        both = ops.empty(tokens, 2 * size, like=hidden)
        for norm, x, out in (
            (self._embed_norm, embedding, both[:, :size]),
            (self._hidden_norm, hidden, both[:, size:]),
        ):
            ops.rms_norm(x, norm.weight, norm.eps, norm.weight_offset, out=out)
        layer = self._layer
        x, residual = layer.feed_forward_norm.add(layer.mixer(both, step), hidden)
        return ops.add(layer.feed_forward(x), residual)

    def guess(self, hidden: Tensor, target: Model | LMHead) -> Tensor:
        """Return the logits; tokens outside of the head's vocabulary are never drafted."""
        own = self._lm_head(self._norm(hidden))
        logits = own.new_full((len(hidden), self.spec.vocab_size), -torch.inf)
        logits[:, self._token_ids] = own
        return logits
