"""EAGLE heads, ready to run: EAGLE (Li et al., 2024), EAGLE-3 (Li et al., 2025), MTP layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.errors import ModelError
from octavo.layers.layer import SequentialLayer
from octavo.layers.step import StepContext
from octavo.models.base import Model
from octavo.models.blocks.base import Parts
from octavo.models.blocks.norm import build_norm
from octavo.models.heads import EagleSpec, LMHeadSpec
from octavo.models.spec import ModelSpec
from octavo.system.tensor import HostTensor, Tensor, full


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
        layer = spec.layers[0].build(parts.of("layers.0"), (0,))
        assert isinstance(layer, SequentialLayer)
        self._layer = layer
        self._fc = spec.fc.build(parts.of("fc"))
        self._ops = parts.ops
        self.dtype = parts.dtype

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
        self._ops.copy_(self.inputs[:tokens, :size], embedding)
        self._ops.copy_(self.inputs[:tokens, size:], hidden)

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


class _NormedModel(EagleModel):
    """Head with norms of both inputs and of its result."""

    def __init__(self, spec: EagleSpec, parts: Parts) -> None:
        super().__init__(spec, parts)
        assert spec.embed_norm is not None
        assert spec.hidden_norm is not None
        self._embed_norm = spec.embed_norm.build(parts.of("embed_norm"))
        self._hidden_norm = spec.hidden_norm.build(parts.of("hidden_norm"))
        self._norm = build_norm(spec.head.norm, parts.of("norm"))


class MTPModel(_NormedModel):
    """MTP layer: an EAGLE head with norms before its projection and after its layer.

    Args:
        spec: the layer.
        parts: the loaded weights and operations.
    """

    def fill(self, embedding: Tensor, hidden: Tensor) -> None:
        """Implement `EagleModel`."""
        tokens, size = hidden.shape
        self._embed_norm(embedding, self.inputs[:tokens, :size])
        self._hidden_norm(hidden, self.inputs[:tokens, size:])

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Implement `EagleModel`."""
        x, residual = self._layer(self._fc(self.inputs[: len(input_ids)]), None, step)
        assert residual is not None
        return self._norm.add(x, residual)[0]


class LMHead:
    """Whole LM head of the target.

    Args:
        spec: the head.
        parts: the loaded weights.
    """

    def __init__(self, spec: LMHeadSpec, parts: Parts) -> None:
        self.head = spec.head.build(parts)


class Eagle3Model(_NormedModel):
    """EAGLE-3: uses hidden states of three layers of the target, and has its own norms and LM head.

    Args:
        spec: the head.
        parts: the loaded weights and operations.
    """

    def __init__(self, spec: EagleSpec, parts: Parts) -> None:
        super().__init__(spec, parts)
        self._lm_head = spec.head.build(parts)
        self._token_ids = np.arange(spec.num_draft_tokens)

    def set_offsets(self, d2t: HostTensor) -> None:
        """Set the map from the head's vocabulary to the target's vocabulary.

        Args:
            d2t: int64 [num_draft_tokens], added to the head's token ids.

        Raises:
            ModelError: the results are no tokens of the target.
        """
        count, vocab_size = len(self._token_ids), self.spec.vocab_size
        offsets = d2t.numpy()
        if offsets.shape != (count,) or offsets.dtype.kind not in "iu":
            raise ModelError(
                f"d2t of the EAGLE-3 head must be {count} integers, draft_vocab_size of config.json"
            )
        self._token_ids = np.arange(count) + offsets.astype(np.int64)
        if self._token_ids.min() < 0 or self._token_ids.max() >= vocab_size:
            raise ModelError(f"d2t of the EAGLE-3 head names tokens beyond {vocab_size}.")

    def input_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape: embeddings, then hidden states."""
        return (2, num_tokens, self.spec.hidden_size)

    def combine(self, hidden: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """Implement `EagleModel`."""
        tokens, size = hidden.shape
        both = self._ops.empty(tokens, len(kept) * size, like=hidden)
        for i, part in enumerate(kept):
            self._ops.copy_(both[:, i * size : (i + 1) * size], part)
        return self._fc(both)

    def fill(self, embedding: Tensor, hidden: Tensor) -> None:
        """Implement `EagleModel`."""
        self._ops.copy_(self.inputs[0, : len(hidden)], embedding)
        self._ops.copy_(self.inputs[1, : len(hidden)], hidden)

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
        mixer, feed_forward = self._layer.sublayers
        x, residual = feed_forward.norm.add(mixer.block(both, step), hidden)
        return ops.add(feed_forward.block(x, step), residual)

    def guess(self, hidden: Tensor, target: Model | LMHead) -> Tensor:
        """Return the logits; tokens outside of the head's vocabulary are never drafted."""
        own = self._lm_head(self._norm(hidden))
        logits = full((len(hidden), self.spec.vocab_size), -np.inf, "float32")
        logits.numpy()[:, self._token_ids] = self._ops.to_host(own)
        return self._ops.to_device(logits)
