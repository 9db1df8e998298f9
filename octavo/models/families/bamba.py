"""Bamba: Llama with state spaces in place of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.families.state_parts import Mamba2Fields, read_dt_range, read_expanded
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Bamba."""
    num_layers, bias = read_num_layers(config), config.flag("attention_bias", False)
    variant = LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        gate_up_modules=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down_module="feed_forward.down_proj",
        feed_forward_norm="pre_ff_layernorm",
        final_norm="model.final_layernorm",
        ropes=(read_llama_rope(config, partial=0.5),) * num_layers,
    )
    spec = variant.read(config)
    mixer = Mamba2Fields().read(
        config,
        "mamba",
        inner_size=read_expanded(config, "mamba_expand"),
        eps=config.number("rms_norm_eps"),
        dt_range=read_dt_range(config),
    )
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(i in range(num_layers) for i in indices):
        raise config.error("attn_layer_indices", f"it must list indices of {num_layers} layers")
    attention = spec.layers[0]
    mamba = attention.with_blocks([mixer, attention.blocks[1]])
    layers = tuple(attention if i in indices else mamba for i in range(num_layers))
    return replace(spec, layers=layers)


ARCHITECTURES = {"BambaForCausalLM": read}
