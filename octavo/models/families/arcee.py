"""Arcee (AFM 4.5B): Llama with the square of ReLU in an MLP without a gate."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Arcee."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        gate_up_modules=("mlp.up_proj",),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
    return variant.read(config)


ARCHITECTURES = {"ArceeForCausalLM": read}
