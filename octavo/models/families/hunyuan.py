"""HunYuan, dense: norms of each head of queries and keys, after their rotation."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read HunYuan."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_modules=("query_layernorm", "key_layernorm"),
        norms_rotated=True,
    )
    return variant.read(config)


ARCHITECTURES = {"HunYuanDenseV1ForCausalLM": read}
