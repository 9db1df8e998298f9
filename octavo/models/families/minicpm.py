"""MiniCPM: Llama with factors on embedding, residuals, logits; MiniCPM3 with latent attention."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_heads, read_num_layers
from octavo.models.families.latent_parts import read_latent_attention, read_latent_rope
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read a dense MiniCPM."""
    config.refuse(
        "sparse_config",
        None,
        "sparse attention is not supported; set it to null in hf_overrides for full attention",
    )
    return _scaled(config).read(config)


def read_minicpm3(config: ConfigJson) -> ModelSpec:
    """Read MiniCPM3."""
    hidden, layers = config.integer("hidden_size"), read_num_layers(config)
    # An absent or null field means: no factor, and heads of values as large as Llama's.
    neutral = {"scale_depth": math.sqrt(layers), "dim_model_base": hidden}
    neutral["v_head_dim"] = hidden // read_num_heads(config)
    for name, value in neutral.items():
        if not config.has(name):
            config = config.replaced(name, value)
    rope = read_latent_rope(config, is_neox=True)
    variant = replace(
        _scaled(config), ropes=(rope,) * layers, mlp_bias=config.flag("mlp_bias", False)
    )
    return variant.read(config, read_latent_attention(config, rope))


def _scaled(config: ConfigJson) -> LlamaLike:
    depth = config.number("scale_depth", default=1.0)
    width = config.integer("hidden_size") / config.integer("dim_model_base", default=1)
    return LlamaLike(
        residual_multiplier=depth / math.sqrt(read_num_layers(config)),
        embed_scale=config.number("scale_emb", default=1.0),
        logit_scale=1 / width,
        tied=True,
    )


ARCHITECTURES = {"MiniCPMForCausalLM": read, "MiniCPM3ForCausalLM": read_minicpm3}
