"""ERNIE 4.5, dense: Llama with neighbours rotated, and one switch for all biases.

The text part of PaddleOCR-VL rotates halves; its positions have parts that are equal in texts.
"""

from __future__ import annotations

from functools import partial

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson, *, is_neox: bool = False) -> ModelSpec:
    """Read ERNIE 4.5; `is_neox`: rotate halves of heads, not neighbours."""
    bias = config.flag("use_bias", False)
    rope = read_llama_rope(config, theta=5e5, is_neox=is_neox, aliases={"mrope": "default"})
    variant = LlamaLike(
        ropes=(rope,) * read_num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {
    "Ernie4_5ForCausalLM": read,
    "PaddleOCRVLForConditionalGeneration": text_part(partial(read, is_neox=True)),
}
