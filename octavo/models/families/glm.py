"""GLM and GLM-4: half of each head is rotated, in pairs of neighbours; GLM-4 norms results, too."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def _glm_like(config: ConfigJson, aliases: dict[str, str] | None = None) -> LlamaLike:
    rope = read_llama_rope(config, partial=0.5, is_neox=False, aliases=aliases)
    return LlamaLike(
        gate_up_modules=("mlp.gate_up_proj",),
        ropes=(rope,) * read_num_layers(config),
        qkv_bias=config.flag("attention_bias", True),
    )


def _with_out_norms(variant: LlamaLike) -> LlamaLike:
    return replace(
        variant,
        mixer_out_norm="post_self_attn_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read GLM."""
    return _glm_like(config).read(config)


def read_glm4(config: ConfigJson) -> ModelSpec:
    """Read GLM-4."""
    return _with_out_norms(_glm_like(config)).read(config)


def read_glm4v(config: ConfigJson) -> ModelSpec:
    """Read the text part of GLM-4.1V or 4.6V; its positions have parts that are equal in texts."""
    config.refuse("attention_bias", True, "supported: biases of queries, keys and values")
    return _with_out_norms(_glm_like(config, {"mrope": "default"})).read(config)


ARCHITECTURES = {
    "GlmForCausalLM": read,
    "Glm4ForCausalLM": read_glm4,
    "Glm4vForConditionalGeneration": text_part(read_glm4v),
    "Glm46VForConditionalGeneration": text_part(read_glm4v),
}
