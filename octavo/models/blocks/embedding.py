"""Specification of the embedding: from token ids and positions to the first hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo.checkpoints.base import Source
from octavo.layers.step_table import StepArray
from octavo.layers.token_types import TokenTypesArray
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec, RMSNormSpec
from octavo.models.weights import Names, Weight
from octavo.quantization.base import WeightForm
from octavo.quantization.plain import PLAIN

if TYPE_CHECKING:
    from octavo.kernels.weights import PackedWeight, QuantizedWeight
    from octavo.layers.embedding import Embedding, LayerInputs
    from octavo.models.blocks.base import Parts, Table
    from octavo.system.tensor import HostTensor, Tensor


@dataclass(frozen=True)
class PositionsSpec:
    """Learned vectors for positions."""

    module: str
    """Module of the checkpoint."""
    rows: int
    skipped: int = 0
    """Number of rows in the checkpoint's table before the row of position 0 (OPT)."""


@dataclass(frozen=True)
class Sinusoids:
    """Computed vectors for positions (arXiv:1706.03762, section 3.5): all sines, then all cosines.

    A `Table`.
    """

    rows: int
    size: int
    first: int = 0
    """Position that the first row is for."""
    ends: bool = False
    """True if the last frequency is 1/10000, as in tensor2tensor; False: it is the one before."""

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`; upper bound for all types."""
        return 4 * self.rows * self.size

    def compute(self, dtype: str) -> HostTensor:
        """Return the vectors: [rows, size]."""
        from octavo.system.tensor import dense, from_numpy

        pairs = self.size // 2
        powers = np.arange(-(-self.size // 2)) / (pairs - 1 if self.ends else self.size / 2)
        positions = np.arange(self.first, self.first + self.rows)
        angles = positions[:, None] / np.power(10000, powers)
        parts = [np.sin(angles), np.cos(angles[:, :pairs])]
        return dense(from_numpy(np.concatenate(parts, 1)), dtype)


@dataclass(frozen=True)
class TokenTypesSpec:
    """Learned vectors for the first and the second text of a pair (BERT)."""

    module: str
    """Module of the checkpoint."""
    rows: int


@dataclass(frozen=True)
class LayerInputsSpec:
    """Inputs of each layer besides the residual stream (Gemma 3n and 4: per-layer embeddings).

    They are (scale * row of a table + norm(project(embedding))) / sqrt(2).
    """

    module: str
    """Module of the table of tokens in the checkpoint."""
    rows: int
    """Number of tokens in the checkpoint's table."""
    vocab_size: int
    """Number of all tokens; a token without a row in the table uses the row of token 0."""
    num_layers: int
    size: int
    """Size of an input of one layer."""
    scale: float
    """Factor on the rows of the table."""
    project: LinearSpec
    """Projection of the embedding to the inputs of all layers."""
    norm: RMSNormSpec
    """Norm of each layer's part of the projection."""
    form: WeightForm = PLAIN
    """Form of the table in the checkpoint and in memory."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the table, the projection and its norm."""
        table = _table(names, self.module, (self.rows, self.num_layers * self.size), self.form)
        if self.vocab_size > self.rows:
            first = tuple(replace(source, parts=((0, 1),)) for source in table.sources)
            sources = table.sources + first * (self.vocab_size - self.rows)
            table = replace(table, shape=(self.vocab_size, table.shape[1]), sources=sources)
        yield table
        yield from self.project.weights(names.of("project"))
        yield from self.norm.weights(names.of("norm"))

    def build(self, parts: Parts) -> LayerInputs:
        """Return the live block."""
        from octavo.layers.embedding import LayerInputs
        from octavo.system.tensor import round_to

        return LayerInputs(
            parts.ops,
            parts.any("weight"),
            self.num_layers,
            round_to(self.scale, parts.dtype),
            self.project.build(parts.of("project")),
            self.norm.build(parts.of("norm")),
            parts.dtype,
        )


@dataclass(frozen=True)
class EmbedSpec:
    """Embedding of tokens, and of learned positions."""

    module: str
    """Module of the checkpoint."""
    vocab_size: int
    size: int
    hidden_size: int
    scale: float | None = None
    """Factor on the embedding (Gemma, Granite)."""
    scale_given: bool = False
    """True if the factor also applies to prompt embeddings. Clients send Granite's unscaled, as in
    the table, and Gemma's already scaled."""
    project: LinearSpec | None = None
    """Projection to the hidden size, if the embedding's size differs (OPT-350m)."""
    projects_sum: bool = False
    """True if the normed sum with the vectors of positions and types is projected (ELECTRA); False:
    the vectors of tokens alone."""
    positions: PositionsSpec | Sinusoids | None = None
    token_types: TokenTypesSpec | None = None
    norm: NormSpec | None = None
    """Norm that is applied last (BLOOM)."""
    form: WeightForm = PLAIN
    """Form of the table of tokens in the checkpoint and in memory."""
    layer_inputs: LayerInputsSpec | None = None
    norm_given: bool = True
    """True if the norm also applies to prompt embeddings. Clients send Muse Glimmer's already
    normed."""
    item_token: int | None = None
    """Token whose row of the table of `layer_inputs` tokens of items, such as pictures, have
    (Gemma 4); None: they have their own."""

    def weights(self, names: Names, *, shared: bool) -> Iterator[Weight]:
        """Yield all weights, except a table that is shared with the LM head."""
        if not shared:
            yield _table(names, self.module, (self.vocab_size, self.size), self.form)
        size = self.size if self.projects_sum else self.hidden_size
        if isinstance(self.positions, PositionsSpec):
            rows, skipped = self.positions.rows, self.positions.skipped
            source = Source(
                f"{names.checkpoint}{self.positions.module}.weight",
                (rows + skipped, size),
                "skip_rows" if skipped else "none",
            )
            shape = (rows, size)
            yield Weight(f"{names.own}positions", "embedding", shape, (source,))
        if self.token_types is not None:
            shape = (self.token_types.rows, size)
            source = Source(f"{names.checkpoint}{self.token_types.module}.weight", shape)
            yield Weight(f"{names.own}token_types", "embedding", shape, (source,))
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        if self.project is not None:
            yield from self.project.weights(names.of("project"))
        if self.layer_inputs is not None:
            yield from self.layer_inputs.weights(names.of("layer_inputs"))

    def tables(self) -> tuple[Table, ...]:
        """Return the table of computed positions."""
        return (self.positions,) if isinstance(self.positions, Sinusoids) else ()

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the arrays of a step that the embedding needs."""
        if self.token_types is None:
            return ()
        return (TokenTypesArray(min(1, self.token_types.rows - 1)),)

    def build(
        self, parts: Parts, shared: Tensor | PackedWeight | QuantizedWeight | None
    ) -> Embedding:
        """Return the live block; `shared` is another block's weight if it is also the table."""
        from octavo.layers.embedding import Embedding
        from octavo.system.tensor import round_to

        return Embedding(
            parts.ops,
            parts.any("weight") if shared is None else shared,
            scale=None if self.scale is None else round_to(self.scale, parts.dtype),
            scale_given=self.scale_given,
            project=None if self.project is None else self.project.build(parts.of("project")),
            projects_sum=self.projects_sum,
            positions=self._build_positions(parts),
            token_types=None if self.token_types is None else parts.tensor("token_types"),
            norm=None if self.norm is None else self.norm.build(parts.of("norm")),
            dtype=parts.dtype,
            norm_given=self.norm_given,
            adapted=parts.adapted_embedding("", self.size, self.vocab_size),
            adapted_types=None
            if self.token_types is None
            else parts.adapted_embedding(
                "token_types",
                self.size if self.projects_sum else self.hidden_size,
                self.token_types.rows,
            ),
        )

    def _build_positions(self, parts: Parts) -> Tensor | None:
        positions = self.positions
        if isinstance(positions, Sinusoids):
            return parts.table(positions, lambda: positions.compute(parts.dtype))
        return None if positions is None else parts.tensor("positions")


def _table(names: Names, module: str, shape: tuple[int, int], form: WeightForm) -> Weight:
    """Return the weight of a table, of which a step gathers rows."""
    sources = form.sources(f"{names.checkpoint}{module}", *shape)
    kind: Literal["embedding", "linear"] = "embedding" if form == PLAIN else "linear"
    return Weight(f"{names.own}weight", kind, shape, sources, form=form)
