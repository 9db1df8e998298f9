"""EXAONE 4 and EXAONE-MoE: norms of heads; layers without a window have no positions.

EXAONE 4 norms the results of its blocks, EXAONE-MoE their inputs.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.experts import GROUPED, read_grouped_experts, read_sparse_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def _exaone_like(config: ConfigJson) -> LlamaLike:
    """Return the differences from Llama. If no layer has a window, all layers have positions."""
    num_layers = read_num_layers(config)
    window = config.optional_integer("sliding_window", least=1)
    layer_types = ["full_attention"] * num_layers
    if window is not None and not config.has("layer_types"):
        pattern = config.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            local = [pattern[i % len(pattern)] == "L" for i in range(num_layers)]
            local[-1] = False
        else:
            period = config.integer("sliding_window_pattern", default=4)
            local = [(i + 1) % period != 0 for i in range(num_layers)]
        layer_types = ["sliding_attention" if value else "full_attention" for value in local]
    windows = read_windows(config, layer_types, window)
    rope = read_llama_rope(config)
    return LlamaLike(
        windows=windows,
        ropes=tuple(rope if window is None or own is not None else None for own in windows),
        qk_norm="head",
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read EXAONE 4."""
    variant = replace(
        _exaone_like(config),
        input_norm=None,
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm=None,
        feed_forward_out_norm="post_feedforward_layernorm",
    )
    return variant.read(config)


def read_experts(config: ConfigJson) -> ModelSpec:
    """Read EXAONE-MoE; parts that predict drafts are not computed."""
    names = replace(GROUPED, choice_bias="mlp.e_score_correction_bias")
    block = read_grouped_experts(config, names)
    return replace(
        _exaone_like(config),
        feed_forwards=read_sparse_layers(config, block),
        ignored=(r"mtp\..*",),
    ).read(config)


ARCHITECTURES = {"Exaone4ForCausalLM": read, "ExaoneMoeForCausalLM": read_experts}
