"""Granite: Llama with factors on embedding, attention scores, residuals and logits."""

from __future__ import annotations

from octavo.models.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Granite."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        scale=config.number("attention_multiplier", default=1.0),
        residual_multiplier=config.number("residual_multiplier", default=1.0),
        embed_scale=config.number("embedding_multiplier", default=1.0),
        embed_scale_given=True,
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )
    return variant.read(config)


ARCHITECTURES = {"GraniteForCausalLM": read}
