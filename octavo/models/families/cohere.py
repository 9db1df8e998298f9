"""Cohere's Command: parallel blocks, layer norms, neighbours rotated, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def _cohere_like(config: ConfigJson) -> LlamaLike:
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        arrangement="parallel",
        feed_forward_norm=None,
        norm="layer",
        qkv_bias=bias,
        o_bias=bias,
        tied=True,
        logit_scale=config.number("logit_scale", default=0.0625),
        # Command R states its training context here.
        max_model_len=config.optional_integer("model_max_length", least=1),
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Command R and Command R+."""
    rope = read_llama_rope(config, theta=5e5, is_neox=False)
    variant = replace(
        _cohere_like(config),
        ropes=(rope,) * read_num_layers(config),
        qk_norm="own" if config.flag("use_qk_norm", False) else "none",
    )
    return variant.read(config)


def read_cohere2(config: ConfigJson) -> ModelSpec:
    """Read Command R7B and Command A: sliding windows; layers without one have no positions."""
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    layer_types = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(read_num_layers(config))
    ]
    windows = read_windows(config, layer_types, config.integer("sliding_window", default=4096))
    rope = read_llama_rope(config, is_neox=False)
    variant = replace(
        _cohere_like(config),
        windows=windows,
        ropes=tuple(None if window is None else rope for window in windows),
    )
    return variant.read(config)


ARCHITECTURES = {"CohereForCausalLM": read, "Cohere2ForCausalLM": read_cohere2}
