"""Jamba: Llama without positions, with state spaces in most layers, and experts in some."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike
from octavo.models.families.state_parts import MambaFields, read_expanded
from octavo.models.spec import ModelSpec

_FIELDS = MambaFields(
    state_size="mamba_d_state",
    taps="mamba_d_conv",
    rank="mamba_dt_rank",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
)


def read(config: ConfigJson) -> ModelSpec:
    """Read Jamba."""
    num_layers = read_num_layers(config)
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    mixed = [False] * num_layers
    if config.integer(name, least=0) > 1:
        mixed = _chosen(config, "expert", num_layers)
    block = _read_experts(config, name) if any(mixed) else None
    variant = LlamaLike(
        feed_forwards=tuple(block if one else None for one in mixed),
        gate_up_modules=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down_module="feed_forward.down_proj",
        feed_forward_norm="pre_ff_layernorm",
        final_norm="model.final_layernorm",
        ropes=(None,) * num_layers,
    )
    spec = variant.read(config)
    mixer = _FIELDS.read(
        config,
        "mamba",
        inner_size=read_expanded(config, "mamba_expand"),
        norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
        eps=config.number("rms_norm_eps"),
    )
    made = {id(layer): layer.with_blocks([mixer, layer.blocks[1]]) for layer in spec.layers}
    chosen = zip(_chosen(config, "attn", num_layers), spec.layers, strict=True)
    return replace(spec, layers=tuple(x if one else made[id(x)] for one, x in chosen))


def _read_experts(config: ConfigJson, name: str) -> ExpertsSpec:
    num_experts = read_num_experts(config, name)
    return experts(
        config,
        Routing(read_top_k(config, num_experts, "num_experts_per_tok"), "softmax"),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=ExpertNames(router="feed_forward.router", experts="feed_forward.experts.{}."),
    )


def _chosen(config: ConfigJson, kind: str, num_layers: int) -> list[bool]:
    """Return True for each layer that the fields `kind`_layer_period and _offset choose."""
    period = config.integer(f"{kind}_layer_period")
    offset = config.integer(f"{kind}_layer_offset", least=0)
    if offset >= period:
        raise config.error(f"{kind}_layer_offset", f"it must be less than the period {period}")
    return [i % period == offset for i in range(num_layers)]


ARCHITECTURES = {"JambaForCausalLM": read}
