"""Kimi Linear: Kimi Delta Attention, latent attention without positions, and experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.sizes import MAX_TAPS
from octavo.models.blocks.gated_delta import GatedDeltaSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.low_rank import LowRankSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.families.base import read_num_heads, read_num_layers
from octavo.models.families.experts import (
    ExpertNames,
    read_grouped_experts,
    read_indices,
    read_sparse_layers,
)
from octavo.models.families.gated_delta import with_delta, with_experts
from octavo.models.families.latent_parts import read_latent_attention
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec

_FIELDS = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Usual names of fields -> their names in this family."""
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Names of fields in configs of transformers -> their names in linear_attn_config."""
_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{}.",
    up=("w1", "w3"),
    down="w2",
    shared="block_sparse_moe.shared_experts.",
    choice_bias="block_sparse_moe.gate.e_score_correction_bias",
)


def read(config: ConfigJson) -> ModelSpec:
    """Read Kimi Linear."""
    config.refuse("mla_use_nope", True, "latent attention with positions is not supported")
    config.refuse("moe_router_activation_func", "sigmoid", "experts are chosen by sigmoid scores")
    config.refuse("moe_layer_freq", 1, "all layers after the first, dense ones have experts")
    config.refuse("num_nextn_predict_layers", 0, "layers that predict drafts are not supported")
    for usual, own in _FIELDS.items():
        config = config.replaced(usual, config.get(own, usual))
    count = read_num_layers(config)
    if not config.has("layer_types"):
        config = config.replaced("layer_types", _read_kinds(config, count))
    delta = _read_delta(config)
    attention = read_latent_attention(config, None)
    spec = LlamaLike(ropes=(None,) * count).read(config, attention)
    spec = with_delta(config, spec, lambda layer: layer.with_blocks([delta, layer.blocks[1]]))
    blocks = read_sparse_layers(config, read_grouped_experts(config, _NAMES))
    # transformers renames the block of a dense layer when it saves a model.
    renamed = tuple(
        (f"model.layers.{i}.mlp.", f"model.layers.{i}.block_sparse_moe.")
        for i, block in enumerate(blocks)
        if block is None
    )
    return replace(with_experts(spec, blocks), prefixes=renamed)


def _read_kinds(config: ConfigJson, count: int) -> list[str]:
    """Return the type of each layer from lists of their numbers, which begin with 1.

    Without lists, each fourth layer after the first has full attention.
    """
    section = config.section("linear_attn_config")
    if not section.has("full_attn_layers") and not section.has("kda_layers"):
        return ["linear_attention" if i % 4 or not i else "full_attention" for i in range(count)]
    full, linear = (read_indices(section, name) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(1, count + 1)):
        raise section.error(
            "full_attn_layers", f"it and kda_layers must name each of the layers 1 to {count} once"
        )
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]


def _read_delta(config: ConfigJson) -> GatedDeltaSpec:
    config.refuse("hidden_act", "silu", "linear attention needs silu")
    section, hidden = config.section("linear_attn_config"), config.integer("hidden_size")
    for field, name in _SIZES.items():
        if section.has(name):
            config = config.replaced(field, section.get(name))
    heads, size = read_num_heads(config, "linear_num_heads"), config.integer("linear_head_dim")
    channels, module = heads * size, "self_attn"

    def low_rank(name: str) -> LowRankSpec:
        down = LinearSpec(((f"{module}.{name}_a_proj", size),), hidden)
        return LowRankSpec(down, LinearSpec(((f"{module}.{name}_b_proj", channels),), size))

    return GatedDeltaSpec(
        in_proj=LinearSpec(tuple((f"{module}.{x}_proj", channels) for x in "qkv"), hidden),
        rates_proj=LinearSpec(((f"{module}.b_proj", heads),), hidden),
        decay=low_rank("f"),
        gate=low_rank("g"),
        out_proj=LinearSpec(((f"{module}.o_proj", hidden),), channels),
        norm=RMSNormSpec(f"{module}.o_norm", size, config.number("rms_norm_eps")),
        module=module,
        convs=("q_conv1d", "k_conv1d", "v_conv1d"),
        num_key_heads=heads,
        num_heads=heads,
        key_size=size,
        value_size=size,
        taps=config.integer("linear_conv_kernel_dim", least=2, most=MAX_TAPS),
    )


ARCHITECTURES = {"KimiLinearForCausalLM": read}
