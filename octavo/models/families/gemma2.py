"""Gemma 2: norms before and after each block, soft caps, a sliding window on every other layer.

VaultGemma has no norms after the blocks.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.gemma import sandwich_like
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def gemma2_like(config: ConfigJson) -> LlamaLike:
    """Return the differences of Gemma 2 from Llama."""
    num_layers = read_num_layers(config)
    layer_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = config.integer("sliding_window", default=4096)
    return replace(
        sandwich_like(config),
        windows=read_windows(config, layer_types, window),
        soft_cap=config.optional_number("attn_logit_softcapping"),
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 2."""
    return gemma2_like(config).read(config)


def read_vault(config: ConfigJson) -> ModelSpec:
    """Read VaultGemma."""
    variant = gemma2_like(config)
    return replace(variant, mixer_out_norm=None, feed_forward_out_norm=None).read(config)


ARCHITECTURES = {"Gemma2ForCausalLM": read, "VaultGemmaForCausalLM": read_vault}
