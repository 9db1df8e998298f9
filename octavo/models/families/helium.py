"""Helium: Llama that rotates pairs of neighbours in a head; see `RopeSpec.is_neox`."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Helium."""
    rope = read_llama_rope(config, theta=1e5, is_neox=False)
    variant = LlamaLike(
        ropes=(rope,) * read_num_layers(config),
        qkv_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    return variant.read(config)


ARCHITECTURES = {"HeliumForCausalLM": read}
