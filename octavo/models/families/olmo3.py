"""OLMo 3: OLMo 2 with sliding windows; only layers without one have scaled positions."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import Heads, read_num_layers, read_windows
from octavo.models.families.llama import read_max_position
from octavo.models.families.olmo2 import olmo2_like
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read OLMo 3."""
    layer_types = [
        "sliding_attention" if (i + 1) % 4 else "full_attention"
        for i in range(read_num_layers(config))
    ]
    windows = read_windows(config, layer_types, config.optional_integer("sliding_window", least=1))
    full, local = (
        read_rope(
            config,
            head_size=Heads.read(config).head_size,
            max_position=read_max_position(config),
            layer_type=layer_type,
            theta=5e5,
        )
        for layer_type in ("full_attention", "sliding_attention")
    )
    variant = replace(
        olmo2_like(config),
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
    )
    return variant.read(config)


ARCHITECTURES = {"Olmo3ForCausalLM": read}
