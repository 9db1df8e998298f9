"""Gemma 2: norms before and after each block, soft caps, a sliding window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.gemma import sandwich_like
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 2."""
    num_layers = read_num_layers(config)
    layer_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = config.integer("sliding_window", default=4096)
    variant = replace(
        sandwich_like(config),
        windows=read_windows(config, layer_types, window),
        soft_cap=config.optional_number("attn_logit_softcapping"),
    )
    return variant.read(config)


ARCHITECTURES = {"Gemma2ForCausalLM": read}
