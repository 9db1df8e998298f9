"""Specification of a model: its parts and its memory, as read from its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from octavo.checkpoints.base import Expected
from octavo.errors import ConfigError, RequestError
from octavo.layers.step_table import StepArray
from octavo.messages import Modality, MultiModalFeatureSpec
from octavo.models.blocks.altup import StreamsSpec
from octavo.models.blocks.attention import Alibi, AttentionSpec
from octavo.models.blocks.base import Table
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.encoder_input import TextInputSpec
from octavo.models.blocks.frames import FramesInputSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.pooler import NO_SENTENCES, PoolerSpec, SentencesSpec
from octavo.models.blocks.wave import WaveInputSpec, lengths
from octavo.models.cache import CacheSpec, CrossCache, EncoderCache
from octavo.models.encoder import EncoderSpec
from octavo.models.weights import Names, Weight
from octavo.quantization.plain import PLAIN
from octavo.sampling_params import BEAM_DEFAULTS, BeamDefaults
from octavo.system.distributed import Rank
from octavo.system.dtypes import DTYPE_NBYTES


@dataclass(frozen=True)
class ModelSpec:
    """Complete specification of a decoder-only model, or of an encoder."""

    architecture: str
    """Name in config.json's `architectures`, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    max_model_len: int
    """Longest context in tokens, rope scaling considered."""
    eos_token_ids: tuple[int, ...]
    """Union of config.json's and generation_config.json's, in that order."""
    bos_token_id: int | None
    dtype: str
    """Type of the checkpoint: "float32", "float16", "bfloat16", or "float64". No model computes in
    float64."""
    generation_config: dict[str, Any]
    """The model's default sampling parameters: temperature, top_p, top_k, min_p,
    repetition_penalty and max_tokens, and for encoder-decoders min_tokens and extra_args, if
    generation_config.json contains them."""
    embed: EmbedSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec
    layer_names: str
    """Prefix of the names of layer {} in the checkpoint, e.g. model.layers.{}."""
    bare_prefix: str
    """Prefix of names that checkpoints of the bare model (without LM head) omit, e.g. `model.`"""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names in a checkpoint that are not weights."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs (own, stored) of prefixes: other beginnings of names in a checkpoint."""
    poolers: tuple[PoolerSpec, ...] = ()
    """Results in place of tokens, one for each task; the first one is the default."""
    sentences: SentencesSpec = NO_SENTENCES
    streams: StreamsSpec | None = None
    """Several residual streams between the layers (Gemma 3n); None: one."""
    left_out: str = ""
    """Parts of the published model that Octavo does not compute, for a message; "": none."""
    model_class: str = "octavo.models.decoder:DecoderModel"
    """Module and name of the `Model` that computes it."""
    shared_layers: tuple[int, ...] = ()
    """Number of the layer in the checkpoint whose weights each layer has, if layers share weights
    (ALBERT); empty: each layer has its own."""
    encoders: tuple[EncoderSpec, ...] = ()
    """Encoders whose rows the model reads: of pictures, sound, or texts."""
    decoder_start_ids: tuple[int, ...] = ()
    """Tokens with which the decoder of an encoder-decoder begins every answer."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that an encoder-decoder never generates (Marian: its padding token)."""
    beams: BeamDefaults = BEAM_DEFAULTS
    """Settings of beam searches, of an encoder-decoder."""
    first_layer: int = 0
    """Index of the first of `layers` in the checkpoint; other stages compute the others."""
    has_embed: bool = True
    """True if it has the embedding; otherwise its input is the output of another stage."""
    has_head: bool = True
    """True if it has the final norm and the LM head; otherwise its output is for the next stage."""
    elsewhere: frozenset[str] = frozenset()
    """Names in the checkpoint that only other stages read."""

    @cached_property
    def cross_caches(self) -> tuple[CrossCache, ...]:
        """Caches of the layers that attend to the rows of an encoder."""
        return tuple(cache for cache in self.caches if isinstance(cache, CrossCache))

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the tokens attend to the rows of an encoder; each request has an input of it."""
        return bool(self.cross_caches)

    @property
    def encoder_modality(self) -> Modality:
        """Kind of the inputs of an encoder-decoder's encoder."""
        return self.encoders[0].modality

    @property
    def encoder_vocab_size(self) -> int:
        """Number of tokens that an encoder of texts knows; 0: it reads no text."""
        inputs = self.encoders[0].inputs
        return inputs.embed.vocab_size if isinstance(inputs, TextInputSpec) else 0

    @property
    def encoder_frames(self) -> tuple[int, int]:
        """Shape of a sound for an encoder-decoder's encoder: frames, numbers of a frame.

        Frames are -1 if their number may vary, and a frame is then a sample. It is 0, 0 if the
        encoder reads no sound.
        """
        inputs = self.encoders[0].inputs
        if isinstance(inputs, WaveInputSpec):
            return -1, 1
        if not isinstance(inputs, FramesInputSpec):
            return 0, 0
        return 2 * inputs.num_positions, inputs.frame_size

    def num_encoder_tokens(self, frames: int) -> int:
        """Return the number of tokens of a sound with a number of frames."""
        is_wave = isinstance(self.encoders[0].inputs, WaveInputSpec)
        return lengths(frames)[-1] if is_wave else frames // 2

    @property
    def max_encoder_len(self) -> int:
        """Number of tokens of the longest input of an encoder-decoder's encoder; 0: it has none."""
        return self.encoders[0].max_num_tokens if self.is_encoder_decoder else 0

    @property
    def generates(self) -> bool:
        """True if the model can generate tokens."""
        return self.head.lm_head is not None

    @property
    def sees_all(self) -> bool:
        """True if a token sees all tokens of its text: one step must compute all of them."""
        return any(isinstance(cache, EncoderCache) for cache in self.caches)

    def pooler(self, task: str) -> PoolerSpec | None:
        """Return the pooler of a task; None: the model does not have it."""
        return next((pooler for pooler in self.poolers if pooler.task == task), None)

    @property
    def embed_size(self) -> int:
        """Size of a prompt embedding."""
        return self.embed.size

    def split(self, rank: Rank) -> ModelSpec:
        """Return a rank's part: some outputs and heads of each layer, a part of the LM head.

        The embedding is whole.

        Raises:
            ConfigError: the model cannot be split, or not among `rank.size` ranks.
        """
        if rank.size == 1:
            return self
        if self.model_class != ModelSpec.model_class:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is not supported with {self.architecture}; "
                "leave it out."
            )
        layers = {id(layer): layer.split(rank) for layer in self.distinct_layers}
        part = replace(
            self,
            layers=tuple(layers[id(layer)] for layer in self.layers),
            head=self.head.split(rank),
            encoders=tuple(encoder.split(rank) for encoder in self.encoders),
        )
        return part._without_others(self) if rank.splits_experts else part

    def split_experts(self, rank: Rank) -> ModelSpec:
        """Return the model with the share of the experts of a rank of several engines.

        Raises:
            ConfigError: the model has no experts, or fewer than there are ranks.
        """
        if rank.size == 1:
            return self
        layers = {
            id(layer): layer.with_blocks([block.split_experts(rank) for block in layer.blocks])
            for layer in self.distinct_layers
        }
        part = replace(self, layers=tuple(layers[id(layer)] for layer in self.layers))
        if part.layers == self.layers:
            raise ConfigError(
                "enable_expert_parallel with data_parallel_size divides experts, and "
                f"{self.architecture} has none; leave it out."
            )
        return part._without_others(self)

    def for_adapters(self) -> ModelSpec:
        """Return the model with the experts whose changes by adapters the rank computes."""
        layers = {
            id(layer): layer.with_blocks([block.for_adapters() for block in layer.blocks])
            for layer in self.distinct_layers
        }
        part = replace(self, layers=tuple(layers[id(layer)] for layer in self.layers))
        return self if part.layers == self.layers else part._without_others(self)

    def _without_others(self, whole: ModelSpec) -> ModelSpec:
        """Return this part of a model; it does not read the names that only other parts need."""
        names, own = ({s.name for w in m.weights() for s in w.sources} for m in (whole, self))
        return replace(self, elsewhere=whole.elsewhere | (names - own))

    def stage(self, begin: int, end: int) -> ModelSpec:
        """Return the stage that computes the layers from `begin` to `end`.

        The first stage has the embedding, and the encoders whose rows replace embeddings; the last
        one has the head. If embedding and head are tied, both stages have the table. All stages
        have an encoder that cross attention reads.

        Raises:
            ConfigError: the model cannot be divided into stages.
        """
        if self.model_class != ModelSpec.model_class:
            raise ConfigError(
                f"pipeline_parallel_size of more than 1 is not supported with {self.architecture}; "
                "leave it out."
            )
        layers = self.layers[begin:end]
        moved = {
            id(layer): layer.with_blocks([block.in_stage(begin) for block in layer.blocks])
            for layer in layers
            if layer.cache_layer is not None
        }
        has_embed, has_head, streams = begin == 0, end == len(self.layers), self.streams
        encoders = self.encoders if has_embed or self.is_encoder_decoder else ()
        if not has_embed:  # there is no table of tokens to share
            encoders = tuple(encoder.with_own_table(self.embed) for encoder in encoders)
        if streams is not None:
            streams = StreamsSpec(
                streams.make if has_embed else (), streams.join if has_head else ()
            )
        stage = replace(
            self,
            layers=tuple(moved.get(id(layer), layer) for layer in layers),
            shared_layers=self.shared_layers[begin:end],
            encoders=encoders,
            streams=streams,
            first_layer=begin,
            has_embed=has_embed,
            has_head=has_head,
        )
        return stage._without_others(self)

    @property
    def hands_residual(self) -> bool:
        """True if the residual stream has two parts between layers; see `Layer`."""
        return self.layers[0].hands_residual

    @property
    def stream_size(self) -> int:
        """Size of x between layers, see `Layer`; of the whole model."""
        return self.hidden_size * (1 if self.streams is None else 1 + len(self.streams.make))

    @property
    def layer_inputs(self) -> tuple[int, int] | None:
        """Shape of a token's `StepContext.layer_inputs`: (layers, numbers); None: it has none."""
        if (inputs := self.embed.layer_inputs) is not None:
            return inputs.num_layers, inputs.size
        shapes = (block.layer_inputs() for block in self.layers[0].blocks)
        return next((shape for shape in shapes if shape is not None), None)

    @property
    def handed_numbers(self) -> int:
        """Numbers that a stage of the whole model hands to the next one for a token."""
        residual = self.hidden_size * self.hands_residual
        return self.stream_size + residual + math.prod(self.layer_inputs or (0,))

    @property
    def tied(self) -> bool:
        """True if the LM head is the embedding's table."""
        lm_head = self.head.lm_head
        return lm_head is not None and lm_head.modules[0][0] == self.embed.module

    def encoder(self, modality: Modality) -> EncoderSpec | None:
        """Return the encoder of the items of a modality; None: the model does not read them."""
        return next((spec for spec in self.encoders if spec.reads(modality)), None)

    def check_item(self, item: MultiModalFeatureSpec) -> None:
        """Check that an encoder can read an item of a prompt.

        Raises:
            RequestError: no encoder can.
        """
        encoder = self.encoder(item.modality)
        if encoder is None:
            raise RequestError(f"this model ({self.architecture}) reads no {item.modality}.")
        encoder.check(item)

    @property
    def deepstack(self) -> int:
        """Number of the first layers to whose results rows of encoders are added."""
        return max((len(encoder.taps) for encoder in self.encoders), default=0)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Caches of all blocks, in the order of the layers."""
        return tuple(cache for layer in self.layers for cache in layer.caches())

    def cache_range(self, begin: int, end: int) -> tuple[int, int]:
        """Return the caches (begin, end) of layers; a layer may have none, or several."""
        counts = [len(layer.caches()) for layer in self.layers]
        return sum(counts[:begin]), sum(counts[:end])

    @property
    def step_arrays(self) -> tuple[StepArray, ...]:
        """Arrays of a step that blocks declare, without duplicates."""
        blocks = [block for layer in self.distinct_layers for block in layer.blocks]
        arrays = dict.fromkeys(array for block in blocks for array in block.arrays())
        if self.has_embed:
            arrays |= dict.fromkeys(self.embed.arrays())
        return tuple(arrays)

    @property
    def names_of_layers(self) -> list[Names]:
        """Prefixes of the names of each layer's weights, which layers with equal ones share."""
        numbers = self.shared_layers
        if numbers:
            return [Names(f"layers.{i}.", self.layer_names.format(i)) for i in numbers]
        return [
            Names(f"layers.{i}.", self.layer_names.format(self.first_layer + i))
            for i in range(len(self.layers))
        ]

    @property
    def distinct_layers(self) -> list[LayerSpec]:
        """Specs of the layers without duplicates."""
        return list({id(layer): layer for layer in self.layers}.values())

    @property
    def uses_alibi(self) -> bool:
        """True if attention has a bias for positions."""
        return any(isinstance(table, Alibi) for table in self._tables())

    @property
    def uses_sinks_or_chunks(self) -> bool:
        """True if attention has sinks, chunks, or values smaller than keys."""
        blocks = [block for layer in self.distinct_layers for block in layer.blocks]
        return any(
            isinstance(block, AttentionSpec)
            and (block.sinks, block.chunk_size, block.value_size) != (None, None, None)
            for block in blocks
        )

    def _tables(self) -> set[Table]:
        layers = self.distinct_layers
        sublayers = [sublayer for layer in layers for sublayer in layer.sublayers]
        norms = [norm for sublayer in sublayers for norm in sublayer.norms.values()]
        norms += [self.embed.norm, self.head.norm]
        tables = {table for layer in layers for block in layer.blocks for table in block.tables()}
        tables |= set(self.embed.tables())
        return tables | {table for norm in norms if norm is not None for table in norm.tables()}

    def weights(self) -> list[Weight]:
        """Return all weights, in the order in which the forward pass uses them.

        If the LM head and the embedding are tied, a whole LM head of the embedding's form is the
        table of both.
        """
        lm_head = self.head.lm_head
        whole = self.has_embed and self.has_head
        weights: list[Weight] = []
        if self.has_embed:
            shared = (
                self.tied
                and whole
                and lm_head is not None
                and lm_head.parts is None
                and (lm_head.forms or (PLAIN,)) == (self.embed.form,)
            )
            weights += self.embed.weights(Names("embed."), shared=shared)
        if self.streams is not None:
            weights += self.streams.weights(Names("streams."))
        for names, layer in dict(zip(self.names_of_layers, self.layers, strict=True)).items():
            weights += layer.weights(names)
        for i, encoder in enumerate(self.encoders):
            weights += encoder.weights(Names(f"encoders.{i}."))
        if self.has_head:
            weights += self.head.weights(Names())
            for pooler in self.poolers:
                weights += pooler.weights(Names(f"poolers.{pooler.task}."))
        return weights

    @property
    def expected(self) -> Expected:
        """Tensors that a checkpoint must contain."""
        sources = [source for weight in self.weights() for source in weight.sources]
        return Expected(
            self.architecture,
            sources,
            self.bare_prefix,
            self.ignored,
            self.elsewhere,
            self.prefixes + tuple(pair for encoder in self.encoders for pair in encoder.prefixes),
        )

    def weight_nbytes(self, dtype: str, max_model_len: int | None = None) -> int:
        """Return the bytes of the loaded model: all weights, and tables of positions.

        Args:
            dtype: "float32", "float16" or "bfloat16".
            max_model_len: longest context; default: the model's.
        """
        total = sum(t.nbytes(max_model_len or self.max_model_len) for t in self._tables())
        total += sum(encoder.tables_nbytes() for encoder in self.encoders)
        return total + sum(weight.nbytes(dtype) for weight in self.weights())

    def loading_nbytes(self, dtype: str, *, made: bool = False) -> int:
        """Return an upper bound of the bytes that loading needs in addition to the loaded weights.

        Weights are read one at a time. Before packing, a linear one is in memory twice: as float32
        (float64 if the checkpoint is), and converted. Others are only converted, and blocks of a
        GGUF file are only copied.

        Args:
            dtype: "float32", "float16" or "bfloat16".
            made: True if no file has the weights: random ones are also in memory as float32.
        """
        source = 8 if self.dtype == "float64" else 4

        def needed(weight: Weight) -> int:
            if all(source.dtypes == ("uint8",) for source in weight.sources):
                return sum(math.prod(source.shape) for source in weight.sources)
            read = source if made or weight.kind == "linear" else 0
            return (read + DTYPE_NBYTES[weight.dtype or dtype]) * math.prod(weight.shape)

        return max(map(needed, self.weights()))


def divide_layers(spec: ModelSpec, num_stages: int, asked: str | None) -> list[tuple[int, int]]:
    """Return the layers of each stage, as pairs (begin, end).

    Args:
        spec: the whole model.
        num_stages: number of stages.
        asked: `pipeline_layers`: the number of layers of each stage. None: minimize the most
            weights that a stage reads for a token, including the LM head.

    Raises:
        ConfigError: there are too few layers, or `asked` does not match the layers, or divides
            layers of which one reads the cache of another.
    """
    layers = len(spec.layers)
    # A stage with a layer that reads the cache of an earlier one has that one, too. The first stage
    # has all layers to whose results rows of encoders are added.
    sources = [(layer.cache_layer, i) for i, layer in enumerate(spec.layers)]
    inside = {b for source, i in sources if source is not None for b in range(source + 1, i + 1)}
    first = set(range(1, spec.deepstack))
    most = layers - len(inside | first)
    if num_stages > most:
        known = f"the {layers} layers of the model"
        if inside:
            known = f"{most}, since some of the {layers} layers read the KV cache of earlier ones"
        elif first:
            known = f"{most}, since the first {spec.deepstack} layers also read rows of pictures"
        raise ConfigError(f"pipeline_parallel_size={num_stages} is more than {known}; lower it.")
    if asked is not None:
        counts = [int(count) for count in asked.split(",")]
        if len(counts) != num_stages or sum(counts) != layers:
            raise ConfigError(
                f"pipeline_layers={asked!r} has {len(counts)} stages with {sum(counts)} layers; "
                f"set {num_stages} numbers (pipeline_parallel_size) with the sum {layers}, the "
                "layers of the model."
            )
        ends = list(accumulate(counts, initial=0))
        if first.intersection(ends):
            raise ConfigError(
                f"pipeline_layers={asked!r} divides the first {spec.deepstack} layers, which also "
                "read rows of pictures; the first stage must have all of them."
            )
        if inside.intersection(ends):
            raise ConfigError(
                f"pipeline_layers={asked!r} divides layers that read the KV cache of earlier ones "
                f"from these; the last stage must have at least {layers - min(inside) + 1} layers."
            )
        return list(pairwise(ends))
    sizes = {id(layer): _linear_size(layer.weights(Names())) for layer in spec.distinct_layers}
    read = [0, *accumulate(sizes[id(layer)] for layer in spec.layers)]
    head = _linear_size(spec.head.weights(Names()))
    # best[k, n]: for k stages with the first n layers, the least possible maximum of the weights
    # that a stage reads, and the begin of the last of these stages. The final stage has the head.
    ends = [n for n in range(1, layers + 1) if n not in inside | first]
    best = {(1, n): (read[n], 0) for n in ends}
    for k in range(2, num_stages + 1):
        for index, n in enumerate(ends[k - 1 :], k - 1):
            more = head if (k, n) == (num_stages, layers) else 0
            best[k, n] = min(
                (max(best[k - 1, begin][0], read[n] - read[begin] + more), begin)
                for begin in ends[k - 2 : index]
            )
    stages: list[tuple[int, int]] = []
    end = layers
    for k in range(num_stages, 0, -1):
        begin = best[k, end][1]
        stages.append((begin, end))
        end = begin
    return stages[::-1]


def _linear_size(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights if weight.kind == "linear")
