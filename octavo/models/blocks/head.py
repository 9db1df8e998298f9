"""Specification of the head: from the last hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.head import Head
    from octavo.layers.shared import BufferRows
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class HeadSpec:
    """Final norm and LM head."""

    norm: NormSpec | None
    lm_head: LinearSpec | None
    """Projection to the logits; its module is the embedding's if the two are tied. None: the model
    generates no tokens (encoders)."""
    project: LinearSpec | None = None
    """Projection to the embedding's size, if it differs (OPT-350m)."""
    scale: float | None = None
    """Factor on the logits (Cohere, Granite)."""
    soft_cap: float | None = None
    """Soft cap of the logits: cap * tanh(logit / cap) (Gemma 2)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of norm, projection and LM head."""
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        if self.project is not None:
            yield from self.project.weights(names.of("project"))
        if self.lm_head is not None:
            yield from self.lm_head.weights(names.of("lm_head"))

    def split(self, rank: Rank) -> HeadSpec:
        """Return the head for a rank's part of the vocabulary."""
        if self.lm_head is None:
            return self
        return replace(self, lm_head=self.lm_head.split(rank.share(self.lm_head.outputs)))

    def build(self, parts: Parts) -> Head:
        """Return the live block, without the norm; the model must have an LM head."""
        from octavo.layers.head import Head

        assert self.lm_head is not None
        lm_head, columns, prompt = self.lm_head.build(parts.of("lm_head")), None, None
        if self.lm_head.parts is not None:
            size, part = self.lm_head.whole_outputs, self.lm_head.parts[0]
            rows: tuple[BufferRows, BufferRows] = "samples", "prompt_logprobs"
            columns, prompt = (
                parts.columns(f"{kind}.logits", size, part, "float32", kind) for kind in rows
            )
            lm_head = replace(lm_head, columns=columns)

        return Head(
            parts.ops,
            lm_head,
            project=None if self.project is None else self.project.build(parts.of("project")),
            scale=self.scale,
            soft_cap=self.soft_cap,
            prompt_columns=prompt,
            adapters=None if lm_head.adapted is None else parts.adapters,
        )
