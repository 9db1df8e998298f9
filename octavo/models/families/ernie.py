"""ERNIE 4.5, dense: Llama with neighbours rotated, and one switch for all biases."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read ERNIE 4.5."""
    bias = config.flag("use_bias", False)
    rope = read_llama_rope(config, theta=5e5, is_neox=False)
    variant = LlamaLike(
        ropes=(rope,) * read_num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"Ernie4_5ForCausalLM": read}
