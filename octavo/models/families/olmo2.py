"""OLMo 2: norms only of each block's result, and of all queries and keys of a token."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def olmo2_like(config: ConfigJson) -> LlamaLike:
    """Return the differences of OLMo 2 and 3 from Llama."""
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        input_norm=None,
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm=None,
        feed_forward_out_norm="post_feedforward_layernorm",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read OLMo 2."""
    return olmo2_like(config).read(config)


ARCHITECTURES = {"Olmo2ForCausalLM": read}
