"""Gemma 1, and parts of all Gemmas: scaled embeddings, weights of norms that begin at 0."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config_json import ConfigJson
from octavo.models.families.base import GATED, read_activation
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def gemma_like(config: ConfigJson) -> LlamaLike:
    """Return the differences of all Gemmas from Llama."""
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        activation=read_activation(config, "hidden_activation", GATED, "gelu_pytorch_tanh"),
        norm_offset=1.0,
        embed_scale=config.integer("hidden_size") ** 0.5,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def sandwich_like(config: ConfigJson) -> LlamaLike:
    """Return the differences of Gemma 2 and 3: norms before and after each block."""
    return replace(
        gemma_like(config),
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_out_norm="post_feedforward_layernorm",
        scale=config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 1."""
    # The first configs of Gemma 1 say gelu and mean the approximation.
    known = GATED | {"gelu": GATED["gelu_pytorch_tanh"]}
    name = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = read_activation(config, name, known, "gelu_pytorch_tanh")
    return replace(gemma_like(config), activation=activation).read(config)


ARCHITECTURES = {"GemmaForCausalLM": read}
