"""Decoder of all architectures, built from the blocks of a `ModelSpec`."""

from __future__ import annotations

from itertools import pairwise

from octavo.layers.experts import Experts
from octavo.layers.layer import Layer
from octavo.layers.step import StepContext
from octavo.layers.token_types import TOKEN_TYPES
from octavo.models.blocks.base import Parts
from octavo.models.blocks.norm import build_norm
from octavo.models.spec import ModelSpec
from octavo.system.tensor import Tensor


class DecoderModel:
    """Decoder-only language model, or a stage of one, ready to run: a `Model`.

    Args:
        spec: the model.
        parts: weights and operations of the blocks; all weights of `spec.weights()` are loaded.
    """

    def __init__(self, spec: ModelSpec, parts: Parts) -> None:
        self.spec = spec
        self.dtype = parts.dtype
        if spec.has_head:
            if spec.generates:
                self.head = spec.head.build(parts)
            self.poolers = {
                pooler.task: pooler.build(parts.of(f"poolers.{pooler.task}"))
                for pooler in spec.poolers
            }
            # Drafters read its result while other ranks have begun the next step.
            self.norm = build_norm(
                spec.head.norm, parts.of("norm"), size=spec.hidden_size, rows="final"
            )
        if spec.has_embed:
            shared = None if parts.has("embed.weight") else self.head.lm_head.weight
            self.embed = spec.embed.build(parts.of("embed"), shared)
            inputs, of_inputs = spec.embed.layer_inputs, parts.of("embed").of("layer_inputs")
            self.layer_inputs = None if inputs is None else inputs.build(of_inputs)
        self.encoders = [
            encoder.build(parts.of_encoder(f"encoders.{i}", encoder.max_num_tokens))
            for i, encoder in enumerate(spec.encoders)
        ]
        self.streams = None if spec.streams is None else spec.streams.build(parts.of("streams"))
        self.layers: list[Layer] = []
        self.mixtures: list[tuple[int, Experts]] = []
        """Mixtures of experts in the order of the forward pass, with the indices of their layers in
        this stage."""
        first = 0
        used: list[tuple[int, ...]] = []
        for i, (layer, names) in enumerate(zip(spec.layers, spec.names_of_layers, strict=True)):
            own = tuple(range(first, first + len(layer.caches())))
            first += len(own)
            used.append(own if layer.cache_layer is None else used[layer.cache_layer])
            built = len(parts.mixtures)
            self.layers.append(layer.build(parts.of(names.own[:-1]), used[i]))
            self.mixtures += [(i, mixture) for mixture in parts.mixtures[built:]]
        self.cross_attention = parts.cross_attention
        """Blocks that attend to the rows of an encoder, in the order of the layers."""
        experts = [w for _, it in self.mixtures for w in it.up.weights if w is not None]
        if 0 < parts.expert_slots < len(experts):  # some experts are not in memory
            for (_, mixture), (_, following) in pairwise(self.mixtures):
                mixture.following = following
        self._add, self._join_ranks = parts.ops.add, parts.join_ranks

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed input_ids [T] int64 -> [T, embed_size], for `StepContext.embeds`."""
        return self.embed.look_up(input_ids)

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Return the hidden states after the final norm.

        A stage starts from `StepContext.received`, and passes its residual stream on without a
        norm.
        """
        x: Tensor
        residual: Tensor | None = None
        if self.spec.has_embed:
            x = self.begin(input_ids, step)
        else:
            assert step.received is not None
            x, residual, step.layer_inputs = step.received
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step)
            if index < len(step.deepstack):
                x = self._add(x, step.deepstack[index])
            if index in step.kept_layers:
                step.kept[index] = x if residual is None else self._add(x, residual)
        if self.spec.has_head:
            return self.finish(x, residual)
        step.handed = x, residual, step.layer_inputs
        self._join_ranks()  # the next step may begin with the buffer that this one ends with
        return x

    @property
    def exchanges(self) -> bool:
        """True if other engines compute some of the experts."""
        return any(mixture.exchange is not None for _, mixture in self.mixtures)

    def serve_experts(self) -> None:
        """Take part in the mixtures of a step of other engines, without tokens."""
        for _, mixture in self.mixtures:
            if mixture.adapted is not None and mixture.adapted.in_step:
                mixture.serve_apart()
            else:
                mixture.serve()

    def begin(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Return the first layer's input."""
        types = step.arrays.get(TOKEN_TYPES.name)
        x = self.embed(input_ids, step.positions, step.embeds, types)
        if self.layer_inputs is not None:
            step.layer_inputs = self.layer_inputs(input_ids, x)
        return x if self.streams is None else self.streams.make(x)

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the hidden states after the final norm, from the last layer's result."""
        if self.streams is not None:
            x = self.streams.join(x)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]
