"""Llama 4: experts with weighted inputs, layers without positions, norms after rotation.

Layers with positions see only their own chunk of a sequence, which begins at a multiple of
attention_chunk_size.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.attention import AttentionSpec, QueryScale
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.families.base import read_layer_types, read_num_layers, text_part, visible
from octavo.models.families.experts import (
    ExpertNames,
    experts,
    has_modules_of_experts,
    read_indices,
    read_num_experts,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope, read_max_position
from octavo.models.families.smollm3 import read_rotated
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(
    router="feed_forward.router",
    experts="feed_forward.experts.",
    up=("gate_up_proj",),
    shared="feed_forward.shared_expert.",
)
_SPLIT = replace(_NAMES, experts="feed_forward.experts.{}.", up=("gate_proj", "up_proj"))
"""Modules of quantized checkpoints."""


def _read_feed_forwards(config: ConfigJson) -> tuple[ExpertsSpec | None, ...]:
    num_experts = read_num_experts(config, "num_local_experts")
    split = has_modules_of_experts(config)
    inner, count = config.integer("intermediate_size"), read_num_layers(config)
    block = experts(
        config,
        Routing(read_top_k(config, num_experts, "num_experts_per_tok"), "sigmoid"),
        num_experts=num_experts,
        inner=inner,
        names=_SPLIT if split else _NAMES,
        shared_inner=inner,
        stacked="none" if split else "conv1d",
        on_input=True,
    )
    step = config.integer("interleave_moe_layer_step", default=1)
    sparse = tuple(range(step - 1, count, step))
    if config.has("moe_layers"):
        sparse = read_indices(config, "moe_layers")
    return tuple(block if i in sparse else None for i in range(count))


def _read_query_scale(config: ConfigJson) -> QueryScale | None:
    """Return the factor of queries without positions; some configs write 4 for true."""
    tuned = config.get("attn_temperature_tuning")
    if not isinstance(tuned, int | None):
        raise config.error("attn_temperature_tuning", "it must be true or false")
    if tuned is not None and not tuned:
        return None
    return QueryScale(
        config.number("attn_scale", default=0.1),
        config.integer("floor_scale", default=8192),
        first=1,
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Llama 4."""
    rotated, length = read_rotated(config), read_max_position(config)
    chunk = config.optional_integer("attention_chunk_size", least=1)
    kinds = ["chunked_attention" if chunk and value else "full_attention" for value in rotated]
    kinds = read_layer_types(config, "layer_types", ("chunked_attention", "full_attention"), kinds)
    bias = config.flag("attention_bias", False)
    rope = read_llama_rope(config, theta=5e5, is_neox=False)
    spec = LlamaLike(
        gate_up_modules=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down_module="feed_forward.down_proj",
        ropes=tuple(rope if value else None for value in rotated),
        max_model_len=length,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="unit" if config.flag("use_qk_norm", True) else "none",
        norms_rotated=True,
        feed_forwards=_read_feed_forwards(config),
    ).read(config.replaced("intermediate_size", config.integer("intermediate_size_mlp")))
    scale = _read_query_scale(config)

    def layer(old: LayerSpec, kind: str) -> LayerSpec:
        attention, block = old.blocks
        assert isinstance(attention, AttentionSpec)
        if kind == "chunked_attention":
            attention = replace(attention, chunk_size=visible(chunk, length))
        if attention.positions is None:
            attention = replace(attention, q_norm=None, k_norm=None, query_scale=scale)
        return old.with_blocks([attention, block])

    layers = zip(spec.layers, kinds, strict=True)
    return replace(spec, layers=tuple(layer(old, kind) for old, kind in layers))


ARCHITECTURES = {
    "Llama4ForCausalLM": read,
    "Llama4ForConditionalGeneration": text_part(read),
}
