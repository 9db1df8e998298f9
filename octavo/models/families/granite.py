"""Granite: Llama with factors on embedding, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def granite_like(config: ConfigJson) -> LlamaLike:
    """Return the differences of all Granites from Llama."""
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        scale=config.number("attention_multiplier", default=1.0),
        residual_multiplier=config.number("residual_multiplier", default=1.0),
        embed_scale=config.number("embedding_multiplier", default=1.0),
        embed_scale_given=True,
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Granite 3."""
    return granite_like(config).read(config)


def read_swa(config: ConfigJson) -> ModelSpec:
    """Read Granite with sliding windows, attention sinks, and a rotary base for each layer."""
    num_layers = read_num_layers(config)
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    rope = read_llama_rope(config)
    thetas = (rope.theta,) * num_layers
    if config.has("layer_rope_theta"):  # 0: no positions
        thetas = config.numbers("layer_rope_theta", num_layers)
        if any(theta != 0 and theta <= 1 for theta in thetas):
            raise config.error("layer_rope_theta", "each must be 0 or more than 1")
    variant = replace(
        granite_like(config),
        windows=read_windows(config, kinds, config.optional_integer("sliding_window", least=1)),
        ropes=tuple(replace(rope, theta=theta) if theta else None for theta in thetas),
        sinks="self_attn.sinks",
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"GraniteForCausalLM": read, "GraniteSWAForCausalLM": read_swa}
