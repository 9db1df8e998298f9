"""From token ids and positions to the first hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.kernels.base import PackedWeight
    from octavo.layers.embedding import Embedding
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class PositionsSpec:
    """A learned vector for each position."""

    module: str
    """Of the checkpoint."""
    rows: int
    skipped: int = 0
    """Rows of the checkpoint's table before that of position 0 (OPT)."""


@dataclass(frozen=True)
class EmbedSpec:
    """Embedding of tokens, and of positions where they are learned."""

    module: str
    """Of the checkpoint."""
    vocab_size: int
    size: int
    hidden_size: int
    scale: float | None = None
    """Factor on the embedding (Gemma, Granite)."""
    scale_given: bool = False
    """Whether it is one on embeddings that come with a prompt, too: Granite's are given as they are
    in the table, Gemma's scaled."""
    project: LinearSpec | None = None
    """To the hidden size, where the embedding has another (OPT-350m)."""
    positions: PositionsSpec | None = None
    norm: NormSpec | None = None
    """Applied last (BLOOM)."""

    def weights(self, names: Names, *, shared: bool) -> Iterator[Weight]:
        """All but the table itself where it is shared with the LM head."""
        if not shared:
            shape = (self.vocab_size, self.size)
            source = Source(f"{names.checkpoint}{self.module}.weight", shape)
            yield Weight(f"{names.own}weight", "embedding", shape, (source,))
        if self.positions is not None:
            rows, skipped = self.positions.rows, self.positions.skipped
            source = Source(
                f"{names.checkpoint}{self.positions.module}.weight",
                (rows + skipped, self.hidden_size),
                "skip_rows" if skipped else "none",
            )
            shape = (rows, self.hidden_size)
            yield Weight(f"{names.own}positions", "embedding", shape, (source,))
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        if self.project is not None:
            yield from self.project.weights(names.of("project"))

    def build(self, parts: Parts, shared: PackedWeight | None) -> Embedding:
        """The live block; `shared`: the LM head's weight, where that is the table, too."""
        from octavo.layers.embedding import Embedding

        return Embedding(
            parts.ops,
            parts.tensor("weight") if shared is None else shared,
            scale=self.scale,
            scale_given=self.scale_given,
            project=None if self.project is None else self.project.build(parts.of("project")),
            positions=None if self.positions is None else parts.tensor("positions"),
            norm=None if self.norm is None else self.norm.build(parts.of("norm")),
        )
