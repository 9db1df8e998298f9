"""Muse Glimmer without pictures: gated attention, normed embeddings, layers without positions."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import (
    GATED,
    Heads,
    read_activation,
    read_num_layers,
    read_windows,
    text_part,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read the text part of Muse Glimmer."""
    num_layers = read_num_layers(config)
    last = num_layers - 1
    kinds = ["sliding_attention" if (last - i) % 4 else "full_attention" for i in range(num_layers)]
    rope = read_llama_rope(config)
    rotated = [bool((last - i) % 4) for i in range(num_layers)]
    if config.has("layer_rope_theta"):  # 0: no positions; other values are not used
        rotated = [theta != 0 for theta in config.numbers("layer_rope_theta", num_layers)]
    config.refuse("attention_bias", False, "Muse Glimmer's projections have no biases")
    variant = LlamaLike(
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_out_norm="post_feedforward_layernorm",
        norm_offset=1.0,
        out_norm_eps=config.number("post_norm_eps"),
        final_norm_offset=0.0,
        activation=read_activation(config, "hidden_activation", GATED),
        windows=read_windows(config, kinds, config.optional_integer("sliding_window", least=1)),
        ropes=tuple(rope if value else None for value in rotated),
        scale=config.number("qk_scale_factor") * Heads.read(config).scale,
        qk_norm="unit",
        attention_gate="self_attn.gate_proj",
        embed_norm=True,
        logit_scale=config.number("output_multiplier"),
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
    )
    return variant.read(config)


ARCHITECTURES = {"MuseGlimmerForConditionalGeneration": text_part(read)}
