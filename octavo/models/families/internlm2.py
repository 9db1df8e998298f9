"""InternLM2 and 2.5: Llama with other names and a fused projection, group by group."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read InternLM2."""
    bias = config.flag("bias", True)
    variant = LlamaLike(
        embed_module="model.tok_embeddings",
        head_module="output",
        input_norm="attention_norm",
        feed_forward_norm="ffn_norm",
        qkv_modules=("attention.wqkv",),
        qkv_layout="by_group",
        o_module="attention.wo",
        gate_up_modules=("feed_forward.w1", "feed_forward.w3"),
        down_module="feed_forward.w2",
        qkv_bias=bias,
        o_bias=bias,
    )
    return variant.read(config)


ARCHITECTURES = {"InternLM2ForCausalLM": read}
