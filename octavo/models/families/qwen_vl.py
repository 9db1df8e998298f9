"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL without pictures: Qwen2 and Qwen3.

Their rotary positions have parts for time, height and width, which are equal in texts.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.llama import LlamaLike, read_llama_rope, read_qwen_windows
from octavo.models.spec import ModelSpec


def _read(config: ConfigJson, variant: LlamaLike, theta: float) -> ModelSpec:
    text = config.section("text_config")
    if text.flag("tie_word_embeddings", False):
        config = config.replaced("tie_word_embeddings", True)
    rope = read_llama_rope(config, theta=theta, aliases={"mrope": "default"})
    return replace(variant, ropes=(rope,) * read_num_layers(config)).read(config)


def read_qwen2_5(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen2-VL or Qwen2.5-VL."""
    return _read(config, LlamaLike(windows=read_qwen_windows(config), qkv_bias=True), 1e6)


def read_qwen3(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen3-VL."""
    bias = config.flag("attention_bias", False)
    return _read(config, LlamaLike(qkv_bias=bias, o_bias=bias, qk_norm="head"), 5e5)


ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": text_part(read_qwen2_5),
    "Qwen2_5_VLForConditionalGeneration": text_part(read_qwen2_5),
    "Qwen3VLForConditionalGeneration": text_part(read_qwen3),
}
