"""Seed-OSS: Llama with separate switches for the biases of attention's projections."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Seed-OSS."""
    variant = LlamaLike(
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    return variant.read(config)


ARCHITECTURES = {"SeedOssForCausalLM": read}
