"""Encoders beside a decoder: towers for pictures and sound, and encoders of texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.errors import ConfigError, RequestError
from octavo.messages import Modality, MultiModalFeatureSpec, PlaceholderRange
from octavo.models.blocks.base import LargestStep, Parts, Table
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.encoder_input import InputSpec, TextInputSpec, array_of
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norm import NormSpec, build_norm
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.blocks.wave import WaveInputSpec
from octavo.models.cache import EncoderCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.layer import Layer
    from octavo.layers.step import StepContext
    from octavo.system.tensor import Tensor


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
    of one size: the keys and values are scratch memory of a run.
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
    def cache(self) -> EncoderCache:
        """Cache of each layer."""
        (cache,) = {cache for layer in self.layers for cache in layer.caches()}
        assert isinstance(cache, EncoderCache)
        return cache

    def reads(self, modality: Modality) -> bool:
        """Return True if it reads items of a modality."""
        return modality == self.modality or modality in self.modalities

    def check(self, item: MultiModalFeatureSpec) -> None:
        """Check that a run can read an item, and that it returns as many rows as the item says.

        Raises:
            RequestError: the item does not fit the model.
        """
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

        Encoders that cannot be divided among `rank.size` ranks, such as those with fewer heads, are
        whole on each rank.
        """
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
        return max(block.scratch_nbytes(backend, largest) for block in blocks)

    def build(self, parts: Parts) -> EncoderModel:
        """Return the live encoder."""
        return EncoderModel(self, parts)


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
        self._taps = {
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
        x, residual = self._inputs(step), None
        results: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            x, residual = layer(x, residual, step)
            if i in self._taps:
                stream = x if residual is None else self._ops.add(x, residual)
                results.append(self._taps[i](stream, step))
        x = self._norm(x) if residual is None else self._norm.add(x, residual)[0]
        return [x if self._output is None else self._output(x, step), *results]
