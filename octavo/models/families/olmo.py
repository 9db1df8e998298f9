"""OLMo 1: layer norms without weights, optional clipping of queries, keys and values."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read OLMo 1."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        norm="layer",
        norm_weight=False,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        clip=config.optional_number("clip_qkv"),
    )
    return variant.read(config)


ARCHITECTURES = {"OlmoForCausalLM": read}
