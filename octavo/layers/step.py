"""Context of a step for the blocks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo import _native
from octavo.attention.base import AttentionBackend
from octavo.system.tensor import Tensor

Handed = tuple[Tensor, "Tensor | None", "Tensor | None"]
"""Output of a stage: (x, residual) as for `Layer`, and `StepContext.layer_inputs`."""


@dataclass(frozen=True, slots=True)
class StepRotary:
    """Rotary positions of a step's tokens, if a table of all positions does not suffice.

    Attributes:
        rows: int64 [T], row of each token in the table; if parts of a head turn separately, [P, T]
            as one dimension, the row of each part.
        table: float32 [rows, rotary_dim], cosines first, as for `Ops.rotary_embedding`.
    """

    rows: Tensor
    table: Tensor


@dataclass(slots=True)
class StepContext:
    """Context of one step for the blocks of a model.

    Attributes:
        positions: int64 [T], each below max_model_len.
        caches: the caches of the model's blocks, as `CacheSpec.view` returns them.
        metadata: locations of the tokens in each cache, as `CacheSpec.metadata` returns them.
        backend: computes attention.
        kept_layers: layers with requested hidden states.
        kept: filled by the model: [T, hidden_size] after each of `kept_layers`, the residual added.
        embeds: [T, embed_size], replaces the tokens' rows of the embedding's table; changed in
            place.
        received: output of the previous stage.
        progress: notified of each layer with keys and values in the cache.
        handed: filled by the model if another stage has the next layers.
        arrays: arrays that blocks declare, by name; see `StepArray`.
        layer_inputs: filled by the model: [T, layers, size], inputs of the layers besides the
            residual stream. With RWKV 7 it is [T, 1, size]: the value of the first layer.
        rotary: rotary positions that the layers with `StepRope` use.
        deepstack: [T, hidden_size] for each of the first layers, added to its result (DeepStack,
            arXiv:2406.04334); zeros for tokens that no row of an encoder replaces.
        item_sizes: sizes of the items of an encoder's run: `EncoderItem.size` of each.
    """

    positions: Tensor
    caches: Sequence[Any]
    metadata: Sequence[Any]
    backend: AttentionBackend
    kept_layers: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    embeds: Tensor | None = None
    received: Handed | None = None
    progress: _native.StepProgress | None = None
    handed: Handed | None = None
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    layer_inputs: Tensor | None = None
    rotary: StepRotary | None = None
    deepstack: Sequence[Tensor] = ()
    item_sizes: Sequence[int] = ()
