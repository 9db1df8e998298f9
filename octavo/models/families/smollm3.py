"""SmolLM3: some layers without positions."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read_rotated(config: ConfigJson) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    num_layers = read_num_layers(config)
    interval = config.integer("no_rope_layer_interval", default=4)
    rotated = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if config.get("no_rope_layers"):  # an empty list counts as absent
        rotated = config.get("no_rope_layers")
        if not isinstance(rotated, list) or len(rotated) < num_layers:
            raise config.error("no_rope_layers", "it must have 0 or 1 for each layer")
    rotated = rotated[:num_layers]
    if any(value not in (0, 1) for value in rotated):
        raise config.error("no_rope_layers", "it must have 0 or 1 for each layer")
    return [bool(value) for value in rotated]


def read(config: ConfigJson) -> ModelSpec:
    """Read SmolLM3."""
    num_layers, rotated = read_num_layers(config), read_rotated(config)
    windows: tuple[int | None, ...] = (None,) * num_layers
    if config.flag("use_sliding_window", False):
        window = config.optional_integer("sliding_window", least=1)
        layer_types = [
            "full_attention" if rope or window is None else "sliding_attention" for rope in rotated
        ]
        windows = read_windows(config, layer_types, window)
    bias = config.flag("attention_bias", False)
    rope = read_llama_rope(config, theta=2e6)
    variant = LlamaLike(
        windows=windows,
        ropes=tuple(rope if value else None for value in rotated),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"SmolLM3ForCausalLM": read}
