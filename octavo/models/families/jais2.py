"""Jais 2: Llama with layer norms, biases, and the square of ReLU in an MLP without a gate."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Jais 2."""
    bias = config.flag("attention_bias", True)
    variant = LlamaLike(
        norm="layer",
        norm_bias=True,
        gate_up_modules=("mlp.up_proj",),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", True),
    )
    return variant.read(config)


ARCHITECTURES = {"Jais2ForCausalLM": read}
