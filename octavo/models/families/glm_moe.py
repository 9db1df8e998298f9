"""GLM-4.5 and models like it: experts chosen by sigmoid scores from groups, partial rotation."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.experts import (
    read_draft_layers,
    read_grouped_experts,
    read_sparse_layers,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read GLM-4.5; the layer after the last predicts drafts and is not computed."""
    num_layers = read_num_layers(config)
    block = read_grouped_experts(config)
    return LlamaLike(
        ropes=(read_llama_rope(config, partial=0.5),) * num_layers,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "none",
        feed_forwards=read_sparse_layers(config, block),
        ignored=(read_draft_layers(config),),
    ).read(config)


def read_solar(config: ConfigJson) -> ModelSpec:
    """Read Solar Open: experts in all layers."""
    num_layers = read_num_layers(config)
    variant = LlamaLike(
        ropes=(read_llama_rope(config, theta=1e6),) * num_layers,
        qkv_bias=config.flag("attention_bias", False),
        feed_forwards=(read_grouped_experts(config),) * num_layers,
    )
    return variant.read(config.replaced("intermediate_size", config.get("moe_intermediate_size")))


def read_dots(config: ConfigJson) -> ModelSpec:
    """Read dots.llm1: heads of queries and keys are normed, and then rotated as a whole."""
    window = config.optional_integer("sliding_window", least=1)
    first = config.integer("max_window_layers", default=62, least=0)
    kinds = [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(read_num_layers(config))
    ]
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        windows=read_windows(config, kinds, window),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        feed_forwards=read_sparse_layers(config, read_grouped_experts(config)),
    ).read(config)


ARCHITECTURES = {
    "Glm4MoeForCausalLM": read,
    "SolarOpenForCausalLM": read_solar,
    "Dots1ForCausalLM": read_dots,
}
