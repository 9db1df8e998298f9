"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL without pictures: Qwen2, Qwen3 and Qwen3-MoE.

Their rotary positions have parts for time, height and width, which are equal in texts.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.experts import experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike, read_llama_rope, read_qwen_windows
from octavo.models.families.qwen_moe import read_feed_forwards
from octavo.models.spec import ModelSpec


def _tied(config: ConfigJson) -> ConfigJson:
    """Return a config in which the field of text_config may also tie the LM head."""
    tied = config.section("text_config").flag("tie_word_embeddings", False)
    return config.replaced("tie_word_embeddings", True) if tied else config


def _read(config: ConfigJson, variant: LlamaLike, theta: float) -> ModelSpec:
    rope = read_llama_rope(config, theta=theta, aliases={"mrope": "default"})
    return replace(variant, ropes=(rope,) * read_num_layers(config)).read(config)


def read_qwen2_5(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen2-VL or Qwen2.5-VL."""
    variant = LlamaLike(windows=read_qwen_windows(config), qkv_bias=True)
    return _read(_tied(config), variant, 1e6)


def _qwen3_like(config: ConfigJson) -> LlamaLike:
    bias = config.flag("attention_bias", False)
    return LlamaLike(qkv_bias=bias, o_bias=bias, qk_norm="head")


def read_qwen3(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen3-VL."""
    return _read(_tied(config), _qwen3_like(config), 5e5)


def read_qwen3_moe(config: ConfigJson) -> ModelSpec:
    """Read the text part of Qwen3-VL with experts; the shares of a token's experts have the sum 1.

    transformers ignores norm_topk_prob, and tie_word_embeddings of text_config, and so does this
    reader.
    """
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    block = experts(
        config,
        Routing(top_k, "softmax", renormalize=True),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
    )
    variant = replace(_qwen3_like(config), feed_forwards=read_feed_forwards(config, block))
    return _read(config, variant, 5e5)


ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": text_part(read_qwen2_5),
    "Qwen2_5_VLForConditionalGeneration": text_part(read_qwen2_5),
    "Qwen3VLForConditionalGeneration": text_part(read_qwen3),
    "Qwen3VLMoeForConditionalGeneration": text_part(read_qwen3_moe),
}
