"""Encoders beside a decoder: towers for pictures and sound, and encoders of texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.errors import ConfigError, RequestError
from octavo.messages import (
    EMBEDS,
    EMBEDS_DTYPES,
    Modality,
    MultiModalFeatureSpec,
    PlaceholderRange,
)
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.base import LargestStep, Parts, Table
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.encoder_input import InputSpec, TextInputSpec, array_of
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.norm import NormSpec, build_norm
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.blocks.wave import WaveInputSpec
from octavo.models.cache import EncoderCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank
from octavo.system.finite import is_finite

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.layer import Layer
    from octavo.layers.projector import Projector
    from octavo.layers.step import StepContext
    from octavo.system.tensor import Tensor


LAYER_TOKENS = 256
"""Most tokens of a piece of a layer."""
STORE_TOKENS = 1024
"""Most tokens of a piece that only stores keys and values, or projects: it takes less time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Smallest part of a run that a step computes."""

    kind: Literal["begin", "store", "layer", "tap", "end"]
    """begin: the hidden states before the first layer. store: the keys and values of a layer.
    layer: the layer. tap: the projection after the layer. end: the last norm and projection."""
    layer: int
    begin: int
    """First token, or first row of a projection."""
    end: int
    """Token, or row, after the last one."""


@dataclass(frozen=True)
class Sight:
    """Rule for the tokens of a prompt that see each other in both directions.

    Other tokens see the tokens up to themselves only.
    """

    scope: Literal["item", "prompt"]
    """item: each run of an item's rows (Gemma 3). prompt: a whole prompt with items (PaliGemma)."""
    longest_run: int = 0
    """Tokens of the longest run of rows, for the scope item."""
    layers: Literal["all", "sliding"] = "all"
    """Layers with this rule: all, or those with a sliding window (Gemma 4)."""
    widens: bool = False
    """True if tokens see each other also beyond a sliding window (PaliGemma 2)."""

    def ranges(self, place: PlaceholderRange, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges (begin, end) of an item in a prompt of `num_tokens` tokens."""
        return place.runs if self.scope == "item" else ((0, num_tokens),)

    def longest(self, max_model_len: int) -> int:
        """Return the number of tokens of the longest range."""
        return self.longest_run if self.scope == "item" else max_model_len


@dataclass(frozen=True)
class EncoderSpec:
    """Specification of an encoder, whose rows a decoder reads.

    The attention of the layers is not causal (`AttentionSpec.causal`), and all layers have caches
    of one size: the keys and values are scratch memory of a run. An encoder without layers only
    projects its input (Gemma 4 12B).
    """

    modality: Modality
    """Items that it reads; a video is a picture with several frames."""
    inputs: InputSpec
    layers: tuple[LayerSpec, ...]
    layer_names: str
    """Prefix of the names of layer {} in the checkpoint."""
    hidden_size: int
    norm: NormSpec | None
    """Norm after the last layer."""
    output: ProjectorSpec | None
    """Projection of tokens to rows; None: the tokens are the rows."""
    max_num_tokens: int
    """Tokens of the longest item, and of a run of several items."""
    max_num_rows: int = 0
    """Most rows of an item, if they may be more than its tokens."""
    segments: tuple[int, ...] = ()
    """Index of `EncoderItem.segments` of each layer; empty: all layers use the first."""
    taps: tuple[tuple[int, ProjectorSpec], ...] = ()
    """Layers after which the tokens are also projected; these rows are further columns of the
    result (DeepStack, arXiv:2406.04334)."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs (own, stored) of prefixes: other beginnings of names in a checkpoint."""
    modalities: tuple[Modality, ...] = ()
    """Other items that it reads, in addition to `modality`."""
    sight: Sight | None = None
    """Tokens of the decoder's prompt that see later ones; None: there are none."""
    is_divided: bool = False
    """True if each rank computes a part of each layer."""

    @property
    def out_size(self) -> int:
        """Number of numbers of a row."""
        size = self.hidden_size if self.output is None else self.output.size
        return size + sum(projector.size for _, projector in self.taps)

    @property
    def longest_item(self) -> int:
        """Upper bound of the rows of an item."""
        return max(self.max_num_tokens, self.max_num_rows)

    @property
    def cache(self) -> EncoderCache | None:
        """Cache of each layer; None: there are no layers."""
        if not self.layers:
            return None
        (cache,) = {cache for layer in self.layers for cache in layer.caches()}
        assert isinstance(cache, EncoderCache)
        return cache

    @property
    def is_by_rows(self) -> bool:
        """True if a layer can be computed for some tokens alone, with the same bits, once the keys
        and values of all tokens are stored."""
        return all(
            layer.arrangement == "sequential"
            and isinstance(layer.blocks[0], AttentionSpec)
            and layer.blocks[0].is_by_rows
            and all(isinstance(it, MLPSpec) and it.layer_input is None for it in layer.blocks[1:])
            for layer in self.layers
        )

    def pieces(self, num_tokens: int, num_rows: int) -> list[Piece]:
        """Return the pieces of the run for an item, in order.

        Args:
            num_tokens: tokens of the item.
            num_rows: its rows.
        """
        pieces = [Piece("begin", 0, 0, num_tokens)]
        taps, is_cut = dict(self.taps), self.is_by_rows and num_tokens > LAYER_TOKENS
        for layer in range(len(self.layers)):
            if is_cut:
                pieces += _cut("store", layer, num_tokens, STORE_TOKENS)
            pieces += _cut("layer", layer, num_tokens, LAYER_TOKENS if is_cut else num_tokens)
            if layer in taps:
                pieces += _cut("tap", layer, num_rows, _rows_of(taps[layer], num_rows))
        last = len(self.layers) - 1
        return [*pieces, *_cut("end", last, num_rows, _rows_of(self.output, num_rows))]

    def num_pieces(self, num_tokens: int, num_rows: int) -> int:
        """Return the number of the pieces of a run; see `pieces`."""
        return len(self.pieces(num_tokens, num_rows))

    def first_column(self, piece: Piece) -> int:
        """Return the first column of a row of the result that a piece, a projection, computes."""
        if piece.kind == "end":
            return 0
        later = [projector.size for layer, projector in self.taps if layer >= piece.layer]
        return self.out_size - sum(later)

    def reads(self, modality: Modality) -> bool:
        """Return True if it reads items of a modality."""
        return modality == self.modality or modality in self.modalities

    def check(self, item: MultiModalFeatureSpec) -> None:
        """Check that a run can read an item, and that it returns as many rows as the item says.

        Raises:
            RequestError: the item does not fit the model.
        """
        if item.is_embeds:
            self._check_embeds(item)
            return
        try:
            arrays = {name: array_of(tensor) for name, tensor in item.data.items()}
            tokens, rows = self.inputs.sizes(arrays)
        except KeyError as error:
            raise RequestError(f"the encoder's input {error} is missing.") from None
        except (TypeError, ValueError) as error:
            raise RequestError(f"the encoder's input is damaged: {error}.") from None
        if tokens > self.max_num_tokens:
            raise RequestError(
                f"it has {tokens} patches or tokens, and the model's encoder reads at most "
                f"{self.max_num_tokens}. Make it smaller."
            )
        said = item.num_encoder_tokens, item.num_rows
        if said != (tokens, rows) or (item.grid is not None and math.prod(item.grid) != rows):
            raise RequestError(
                f"it is prepared as {said[0]} patches or tokens and {said[1]} embeddings, and the "
                f"model's encoder computes {tokens} and {rows}; the model's config.json and "
                "preprocessor_config.json must describe the same pictures."
            )

    def _check_embeds(self, item: MultiModalFeatureSpec) -> None:
        """Check the rows that a caller gives in place of an item.

        Raises:
            RequestError: the model's rows have another form, or numbers are not finite.
        """
        embeds, kind = item.data.get(EMBEDS), f"{item.modality}_embeds"
        if embeds is None or len(item.data) > 1 or embeds.dtype not in EMBEDS_DTYPES:
            raise RequestError(f"{kind} are no array of {', '.join(EMBEDS_DTYPES)}.")
        count, size = item.num_rows, self.out_size
        if (
            len(embeds.shape) != 2
            or embeds.shape[0] != count
            or len(embeds.data) != (math.prod(embeds.shape) * EMBEDS_DTYPES[embeds.dtype])
        ):
            raise RequestError(
                f"{kind} have the shape {list(embeds.shape)[:8]} and {len(embeds.data)} bytes, and "
                f"the prompt has {count} places for them; give [{count}, {size}]."
            )
        if embeds.shape[1] != size:
            more = [projector.size for _, projector in self.taps]
            columns = f"{size - sum(more)} of the last layer, then {more} of DeepStack, in order"
            raise RequestError(
                f"{kind} have {embeds.shape[1]} numbers in a row, and this model's rows have "
                f"{size}{f': {columns}' if more else ''}. Give the rows of this model's encoder."
            )
        if item.grid is not None and math.prod(item.grid) != count:
            raise RequestError(
                f"{kind} have {count} rows, and the grid {list(item.grid)} has "
                f"{math.prod(item.grid)}; give the rows and the grid of one picture."
            )
        if not is_finite(embeds.data, embeds.dtype):
            raise RequestError(
                f"{kind} hold numbers that are not finite (NaN, infinity); send finite ones."
            )

    def weights(self, names: Names) -> list[Weight]:
        """Return all weights, in the order in which a run uses them."""
        weights = list(self.inputs.weights(names.of("inputs")))
        for i, layer in enumerate(self.layers):
            own = f"{names.own}layers.{i}."
            weights += layer.weights(Names(own, self.layer_names.format(i)))
        if self.norm is not None:
            weights += self.norm.weights(names.of("norm"))
        if self.output is not None:
            weights += self.output.weights(names.of("output"))
        for i, (_, projector) in enumerate(self.taps):
            weights += projector.weights(names.of(f"taps.{i}"))
        return weights

    def split(self, rank: Rank) -> EncoderSpec:
        """Return a rank's part: some outputs and heads of each layer; all else is whole.

        Encoders that cannot be divided among `rank.size` ranks, such as those with fewer heads or
        without layers, are whole on each rank.
        """
        if not self.layers:
            return self
        rank = Rank(rank.index, rank.size)  # columns of all: no sums, rows or experts
        try:
            layers = {id(layer): layer.split(rank) for layer in self.layers}
        except ConfigError:
            return self
        return replace(self, layers=tuple(layers[id(it)] for it in self.layers), is_divided=True)

    def with_own_table(self, embed: EmbedSpec) -> EncoderSpec:
        """Return the encoder with a copy of the decoder's table of tokens, if it shares it.

        Args:
            embed: the decoder's embedding, which another stage has.
        """
        inputs = self.inputs
        if not isinstance(inputs, TextInputSpec) or not inputs.shares_table:
            return self
        own = replace(inputs.embed, module=embed.module, form=embed.form)
        return replace(self, inputs=replace(inputs, embed=own, shares_table=False))

    def tables_nbytes(self) -> int:
        """Return the bytes of the tables that are computed, not loaded."""
        tables: set[Table] = set()
        if isinstance(self.inputs, TextInputSpec):
            tables |= set(self.inputs.embed.tables())
        if isinstance(self.inputs, WaveInputSpec):
            tables.add(self.inputs.ones)
        for layer in self.layers:
            tables |= {table for block in layer.blocks for table in block.tables()}
        return sum(table.nbytes(self.max_num_tokens) for table in tables)

    def scratch_nbytes(self, backend: AttentionBackend, num_threads: int) -> int:
        """Return an upper bound of the bytes that the kernels of the layers keep."""
        largest = LargestStep(self.max_num_tokens, self.max_num_tokens, num_threads)
        blocks = {block for layer in self.layers for block in layer.blocks}
        return max((block.scratch_nbytes(backend, largest) for block in blocks), default=0)

    def build(self, parts: Parts) -> EncoderModel:
        """Return the live encoder."""
        return EncoderModel(self, parts)


def _cut(
    kind: Literal["store", "layer", "tap", "end"], layer: int, count: int, size: int
) -> Iterator[Piece]:
    """Yield pieces of at most `size` of `count` tokens or rows."""
    for begin in range(0, count, size):
        yield Piece(kind, layer, begin, min(begin + size, count))


def _rows_of(projector: ProjectorSpec | None, num_rows: int) -> int:
    """Return the most rows of a piece of a projection."""
    if projector is None or not projector.is_by_rows:
        return num_rows
    return max(1, STORE_TOKENS // projector.group)


class EncoderModel:
    """Encoder that is ready to run.

    Args:
        spec: the encoder.
        parts: weights and operations of its blocks.
    """

    def __init__(self, spec: EncoderSpec, parts: Parts) -> None:
        self.spec = spec
        self.dtype = parts.dtype
        self._ops = parts.ops
        self._inputs = spec.inputs.build(parts.of("inputs"))
        self._layers: list[Layer] = [
            layer.build(parts.of(f"layers.{i}"), (i,)) for i, layer in enumerate(spec.layers)
        ]
        self._norm = build_norm(spec.norm, parts.of("norm"))
        self._output = None if spec.output is None else spec.output.build(parts.of("output"))
        self._taps: dict[int, Projector] = {
            layer: projector.build(parts.of(f"taps.{i}"))
            for i, (layer, projector) in enumerate(spec.taps)
        }

    def forward(self, step: StepContext) -> list[Tensor]:
        """Return the rows of a run's items.

        Args:
            step: the context of the run, with the arrays of all items joined.

        Returns:
            The rows [R, size] of the last layer, and those of each tap.
        """
        x, residual = self.begin(step), None
        taps: list[Tensor] = []
        for i in range(len(self._layers)):
            x, residual = self.layer(i, x, residual, step)
            if i in self._taps:
                taps.append(self.tap(i, x, residual, step))
        return [self.end(x, residual, step), *taps]

    def begin(self, step: StepContext) -> Tensor:
        """Return the hidden states before the first layer; `step` is that of `forward`."""
        return self._inputs(step)

    def layer(
        self, layer: int, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer; arguments and result are as for `Layer`.

        If `EncoderSpec.is_by_rows`, x, residual and `step` may have some of the tokens of a run
        whose keys and values are stored.
        """
        return self._layers[layer](x, residual, step)

    def store(self, layer: int, x: Tensor, residual: Tensor | None, step: StepContext) -> None:
        """Store the keys and values that `layer` stores for the same arguments."""
        from octavo.layers.layer import SequentialLayer

        live = self._layers[layer]
        assert isinstance(live, SequentialLayer)
        live.store(x, residual, step)

    def tap(
        self,
        layer: int,
        x: Tensor,
        residual: Tensor | None,
        step: StepContext,
        rows: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the rows of the tap after a layer, all of them or those from `rows`."""
        stream = x if residual is None else self._ops.add(x, residual)
        return self._taps[layer](stream, step, rows)

    def end(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepContext,
        rows: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the rows of the last layer, all of them or those from `rows`."""
        x = self._norm(x) if residual is None else self._norm.add(x, residual)[0]
        return x if self._output is None else self._output(x, step, rows)
