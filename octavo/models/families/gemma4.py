"""Gemma 4: heads by layer type, last layers that read earlier caches, per-layer embeddings."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families import gemma_parts as parts
from octavo.models.families.base import read_num_layers, read_windows, text_part
from octavo.models.families.gemma import sandwich_like
from octavo.models.families.llama import read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 4, with experts if enable_moe_block says so."""
    length, count = read_max_position(config), read_num_layers(config)
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    # The last layer is always full; its type in the config is not used, as in transformers.
    windows = (*read_windows(config, types, config.integer("sliding_window"))[:-1], None)
    sources, same = parts.read_sources(config, windows), config.flag("attention_k_eq_v", False)
    wide = config.flag("use_double_wide_mlp", False)
    inner, own_heads = config.integer("intermediate_size"), parts.read_own_fields(config, count)

    def sizes(i: int) -> dict[str, int]:
        """Return the fields with the sizes of layer i."""
        fields, own = ["head_dim", "num_key_value_heads"], config
        if config.has("per_layer_config"):
            own = own_heads[i]
        elif windows[i] is None:
            fields = ["global_head_dim", "num_global_key_value_heads" if same else fields[1]]
        names = zip(("head_dim", "num_key_value_heads"), fields, strict=True)
        heads = {name: own.integer(f, default=config.integer(name)) for name, f in names}
        is_wide = wide and sources[i] is not None
        return heads | {"intermediate_size": 2 * inner if is_wide else inner}

    ropes = [
        read_rope(
            config,
            head_size=sizes(i)["head_dim"],
            max_position=length,
            layer_type="full_attention" if window is None else "sliding_attention",
        )
        for i, window in enumerate(windows)
    ]
    like = replace(sandwich_like(config), norm_offset=0.0, scale=1.0, qk_norm="head")
    like = replace(like, windows=windows, ropes=tuple(ropes), max_model_len=length)
    spec = parts.read_layers(like, config, [sizes(i) for i in range(count)])
    is_key = [same and window is None for window in windows]
    spec = parts.with_sources(spec, config, sources, values_are_keys=is_key)
    layers = [replace(layer, scalar="layer_scalar") for layer in spec.layers]
    spec = parts.with_layer_inputs(replace(spec, layers=tuple(layers)), config)
    return parts.with_experts(spec, config) if config.flag("enable_moe_block", False) else spec


ARCHITECTURES = {
    f"Gemma4{kind}ForConditionalGeneration": text_part(read) for kind in ("", "Unified")
}
ARCHITECTURES |= {"Gemma4ForCausalLM": read, "Gemma4UnifiedForCausalLM": read}
