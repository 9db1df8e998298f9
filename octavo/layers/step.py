"""What blocks know of a step beside their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from octavo import _native
from octavo.attention.base import AttentionBackend, AttentionMetadata


@dataclass(slots=True)
class StepContext:
    """One step, as the blocks of a model see it.

    Attributes:
        positions: int64 [T], each below max_model_len.
        caches: one for each layer that keeps something, laid out as the backend wants it.
        metadata: likewise; layers of one group share one.
        backend: computes attention.
        kept_layers: layers whose hidden states are wanted.
        kept: filled by the model: [T, hidden_size] behind each of them, the residual added.
        embeds: [T, embed_size], what to take instead of the tokens' rows in the embedding's table;
            changed.
        received: what the stage before has handed on, (x, residual) as `Layer` takes them.
        progress: is told of each layer whose keys and values are in the cache.
        handed: filled by the model, where the layers behind are another stage's: likewise.
    """

    positions: Tensor
    caches: Sequence[Tensor]
    metadata: Sequence[AttentionMetadata]
    backend: AttentionBackend
    kept_layers: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    embeds: Tensor | None = None
    received: tuple[Tensor, Tensor | None] | None = None
    progress: _native.StepProgress | None = None
    handed: tuple[Tensor, Tensor | None] | None = None
