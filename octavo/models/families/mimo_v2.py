"""MiMo V2 Flash: values smaller than keys; sinks and more heads of keys in layers with windows."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.families.base import Heads, read_num_layers, read_windows
from octavo.models.families.experts import GROUPED, read_grouped_experts, read_sparse_layers
from octavo.models.families.gemma_parts import read_layers
from octavo.models.families.llama import LlamaLike, read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec

_KINDS = "full_attention", "sliding_attention"


def _read_pattern(config: ConfigJson, name: str, default: list[bool]) -> list[bool]:
    """Return a field with 0 or 1 for each layer, as published configs have them."""
    if not config.has(name):
        return default
    values = config.numbers(name, len(default))
    if not set(values) <= {0, 1}:
        raise config.error(name, "it must have 0 or 1 for each layer")
    return [bool(value) for value in values]


def _read_windows(config: ConfigJson) -> tuple[int | None, ...]:
    count, length = read_num_layers(config), config.integer("sliding_window")
    if config.has("sliding_window_size"):  # the positions before the token's own
        length = config.integer("sliding_window_size") + 1
    local = [i > 0 and (i + 1) % 6 > 0 for i in range(count)]
    local = _read_pattern(config, "hybrid_layer_pattern", local)
    return read_windows(config, [_KINDS[value] for value in local], length)


def read(config: ConfigJson) -> ModelSpec:
    """Read MiMo V2 Flash; layers that predict drafts are not computed."""
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        config.refuse(name, value, f"only {value} is supported")
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        config.refuse(f"swa_{name}", config.get(name), f"only the value of {name} is supported")
    heads, windows = Heads.read(config), _read_windows(config)
    value_size = config.integer("v_head_dim", most=heads.head_size)
    many = config.integer("swa_num_key_value_heads", default=2 * heads.num_kv_heads)
    sinks = config.flag("add_full_attention_sink_bias", False)
    sinks_of_windows = config.flag("add_swa_attention_sink_bias", True)
    full, local = (
        read_rope(
            config,
            head_size=heads.head_size,
            max_position=read_max_position(config),
            layer_type=kind,
            theta_field=field,
            theta=theta,
            partial=0.334,
        )
        for kind, field, theta in zip(
            _KINDS, ("rope_theta", "swa_rope_theta"), (5e6, 1e4), strict=True
        )
    )
    sparse = _read_pattern(config, "moe_layer_freq", [i > 0 for i in range(len(windows))])
    kinds = ["sparse" if value else "dense" for value in sparse]
    block = read_grouped_experts(config, GROUPED)
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        value_size=value_size if value_size < heads.head_size else None,
        value_scale=1.0
        if (scale := config.optional_number("attention_value_scale")) is None
        else scale,
        sinks="self_attn.attention_sink_bias",
        feed_forwards=read_sparse_layers(config, block, default=kinds),
        ignored=(r"model\.mtp\..*",),
    )
    own = [heads.num_kv_heads if window is None else many for window in windows]
    spec = read_layers(variant, config, [{"num_key_value_heads": number} for number in own])

    def layer(old: LayerSpec, window: int | None) -> LayerSpec:
        attention, block = old.blocks
        assert isinstance(attention, AttentionSpec)
        if sinks if window is None else sinks_of_windows:
            return old
        return old.with_blocks([replace(attention, sinks=None), block])

    layers = zip(spec.layers, windows, strict=True)
    return replace(spec, layers=tuple(layer(old, window) for old, window in layers))


ARCHITECTURES = {"MiMoV2FlashForCausalLM": read}
