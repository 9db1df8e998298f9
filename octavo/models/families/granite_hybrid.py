"""Granite 4: Granite with state spaces in place of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_layer_types, read_num_layers
from octavo.models.families.granite import granite_like
from octavo.models.families.granite_moe import granite_experts
from octavo.models.families.llama import read_llama_rope
from octavo.models.families.state_parts import (
    MIXERS,
    Mamba2Fields,
    read_dt_range,
    read_expanded,
)
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Granite 4, with or without experts."""
    num_layers = read_num_layers(config)
    positions = {"rope": "rope", "nope": ""}
    kind = config.choice("position_embedding_type", positions, "nope")
    variant = replace(
        granite_like(config),
        mlp_bias=False,
        gate_up_modules=("shared_mlp.gate_proj", "shared_mlp.up_proj")
        if config.flag("split_shared_mlp", False)  # GGUF
        else ("shared_mlp.input_linear",),
        down_module="shared_mlp.output_linear",
        ropes=(read_llama_rope(config, partial=1.0) if kind else None,) * num_layers,
    )
    inner = config.integer("shared_intermediate_size")
    spec = variant.read(config.replaced("intermediate_size", inner))
    if config.integer("num_local_experts", default=0, least=0):
        block = granite_experts(config, inner)
        spec = replace(spec, layers=tuple(x.with_blocks([x.blocks[0], block]) for x in spec.layers))
    mixer = Mamba2Fields().read(
        config,
        "mamba",
        inner_size=read_expanded(config, "mamba_expand"),
        eps=config.number("rms_norm_eps"),
        dt_range=read_dt_range(config),
    )
    attention = spec.layers[0]
    layers = {"attention": attention}
    layers["mamba"] = attention.with_blocks([mixer, attention.blocks[1]])
    name = "layer_types" if config.has("layer_types") else "layers_block_type"
    kinds = read_layer_types(config, name, tuple(MIXERS), ["mamba"] * num_layers)
    return replace(spec, layers=tuple(layers[MIXERS[kind]] for kind in kinds))


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": read}
