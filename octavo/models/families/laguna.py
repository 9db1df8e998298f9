"""Laguna: layers with different numbers of heads, softplus gates of the heads' results."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import MOST_HEADS, Heads, read_num_layers, read_windows
from octavo.models.families.experts import (
    ExpertNames,
    experts,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
)
from octavo.models.families.gemma_parts import read_layers
from octavo.models.families.llama import LlamaLike, read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(choice_bias="mlp.experts.e_score_correction_bias")


def _read_experts(config: ConfigJson) -> ExpertsSpec:
    config.refuse("moe_apply_router_weight_on_input", False, "weights of inputs are not supported")
    num_experts = read_num_experts(config, "num_experts")
    return experts(
        config,
        Routing(
            read_top_k(config, num_experts, "num_experts_per_tok"),
            "sigmoid",
            soft_cap=max(0.0, config.number("moe_router_logit_softcapping", default=0.0)),
            renormalize=True,
            scale=config.number("moe_routed_scaling_factor", default=1.0),
        ),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=_NAMES,
        shared_inner=config.integer("shared_expert_intermediate_size"),
    )


def _read_num_heads(config: ConfigJson, count: int) -> list[int]:
    """Return the number of query heads of each layer."""
    name = "num_attention_heads_per_layer"
    if not config.has(name):
        return [config.integer("num_attention_heads")] * count
    values = config.numbers(name, count)
    if any(not value.is_integer() or not 0 < value <= MOST_HEADS for value in values):
        raise config.error(name, f"it must have a number of 1 to {MOST_HEADS} for each layer")
    return [int(value) for value in values]


def read(config: ConfigJson) -> ModelSpec:
    """Read Laguna."""
    config.refuse("attention_bias", False, "projections of attention with biases are not supported")
    count = read_num_layers(config)
    window = config.optional_integer("sliding_window", least=1)
    windows = read_windows(config, ["full_attention"] * count, window)
    full, local = (
        read_rope(
            config,
            head_size=Heads.read(config).head_size,
            max_position=read_max_position(config),
            layer_type=kind,
            theta=theta,
            partial=partial,
        )
        for kind, theta, partial in (("full_attention", 5e5, 0.5), ("sliding_attention", 1e4, 1.0))
    )
    gating = config.get("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise config.error("gating", "supported: true, per-head, per-element")
    variant = LlamaLike(
        qk_norm="head",
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        attention_gate="self_attn.g_proj",
        gate_activation="softplus",
        gates_of_heads=gating != "per-element",
        feed_forwards=read_sparse_layers(config, _read_experts(config), dense=1),
    )
    sizes = [{"num_attention_heads": number} for number in _read_num_heads(config, count)]
    return read_layers(variant, config, sizes)


ARCHITECTURES = {"LagunaForCausalLM": read}
