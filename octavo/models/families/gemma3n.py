"""Gemma 3n: several residual streams, sparse gates, per-layer embeddings, shared caches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families import gemma_parts as parts
from octavo.models.families.base import read_num_layers, read_windows, text_part
from octavo.models.families.gemma import sandwich_like
from octavo.models.families.llama import read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 3n, the text model."""
    config.refuse("altup_correct_scale", True, "the per-layer input needs the scaled stream")
    count, length = read_num_layers(config), read_max_position(config)
    types = ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(count)]
    windows = read_windows(config, types, config.integer("sliding_window"))
    rope = partial(read_rope, config, head_size=config.integer("head_dim"), max_position=length)
    full = rope(layer_type="full_attention", theta=1e6)
    local = rope(layer_type="sliding_attention", theta_field="rope_local_base_freq")
    variant = replace(
        sandwich_like(config),
        norm_offset=0.0,
        scale=1.0,
        qk_norm="head",
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        max_model_len=length,
    )
    inner = parts.read_of_layers(config, "intermediate_size", count)
    spec = parts.read_layers(variant, config, [{"intermediate_size": int(n)} for n in inner])
    sources = parts.read_sources(config, windows)
    spec = parts.with_sources(spec, config, sources, values_are_keys=[False] * count)
    usual = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    sparse = parts.read_of_layers(config, "activation_sparsity_pattern", count, usual)
    spec = parts.with_sparsity(spec, config, sparse)
    # The table of per-layer embeddings has no rows for the ids of pictures and sounds.
    return parts.with_streams(parts.with_layer_inputs(spec, config, most_without=1024), config)


ARCHITECTURES = {
    "Gemma3nForCausalLM": read,
    "Gemma3nForConditionalGeneration": text_part(read),
}
