"""BitNet b1.58: Llama with more norms, the square of ReLU as a gate, and ternary weights."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read BitNet; `octavo/quantization/bitnet.py` reads its ternary weights."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        out_norm="self_attn.attn_sub_norm",
        inner_norm="mlp.ffn_sub_norm",
        ropes=(read_llama_rope(config, theta=5e5),) * read_num_layers(config),
    )
    return variant.read(config)


ARCHITECTURES = {"BitNetForCausalLM": read}
