"""InternLM3: Llama with other field names for the biases of products."""

from __future__ import annotations

from octavo.models.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read InternLM3."""
    # The second name is that of the config in transformers.
    bias = config.flag("bias", config.flag("mlp_bias", False))
    variant = LlamaLike(
        qkv_bias=config.flag("qkv_bias", config.flag("attention_bias", False)),
        o_bias=bias,
        mlp_bias=bias,
    )
    return variant.read(config)


ARCHITECTURES = {"InternLM3ForCausalLM": read}
