"""What blocks know of a step beside their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from octavo import _native
from octavo.attention.base import AttentionBackend


@dataclass(slots=True)
class StepContext:
    """One step, as the blocks of a model see it.

    Attributes:
        positions: int64 [T], each below max_model_len.
        caches: the caches of the model's blocks, as `CacheSpec.view` returns them.
        metadata: for each of them how its tokens are found, as `CacheSpec.metadata` returns it.
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
    caches: Sequence[Any]
    metadata: Sequence[Any]
    backend: AttentionBackend
    kept_layers: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    embeds: Tensor | None = None
    received: tuple[Tensor, Tensor | None] | None = None
    progress: _native.StepProgress | None = None
    handed: tuple[Tensor, Tensor | None] | None = None
