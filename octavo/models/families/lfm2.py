"""LFM2: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.kernels.sizes import MAX_TAPS
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.short_conv import ShortConvSpec
from octavo.models.families.base import read_layer_types, read_num_layers
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read LFM2."""
    num_layers, hidden = read_num_layers(config), config.integer("hidden_size")
    if config.has("tie_embedding"):
        config = config.replaced("tie_word_embeddings", config.get("tie_embedding"))
    variant = LlamaLike(
        eps=config.number("norm_eps", default=1e-5),
        o_module="self_attn.out_proj",
        qk_norm="head",
        qk_norm_modules=("q_layernorm", "k_layernorm"),
        gate_up_modules=("feed_forward.w1", "feed_forward.w3"),
        down_module="feed_forward.w2",
        activation="silu",
        input_norm="operator_norm",
        feed_forward_norm="ffn_norm",
        final_norm="model.embedding_norm",
        ropes=(read_llama_rope(config, theta=1e6),) * num_layers,
        tied=True,
    )
    spec = variant.read(config.replaced("intermediate_size", _inner_size(config)))
    bias = config.flag("conv_bias", False)
    taps = config.integer("conv_L_cache", default=3, least=2, most=MAX_TAPS)
    conv = ShortConvSpec(
        LinearSpec((("conv.in_proj", 3 * hidden),), hidden, bias),
        ConvSpec("conv.conv", hidden, taps, bias),
        LinearSpec((("conv.out_proj", hidden),), hidden, bias),
    )
    attention = spec.layers[0]
    kinds = {"full_attention": attention}
    kinds["conv"] = attention.with_blocks([conv, attention.blocks[1]])
    indices = config.get("full_attn_idxs")
    default = "full_attention" if indices is None else "conv"
    types = [default] * num_layers
    if indices is not None and not (
        isinstance(indices, list)
        and all(type(index) is int and 0 <= index < num_layers for index in indices)
    ):
        raise config.error("full_attn_idxs", f"it must list indices of {num_layers} layers")
    for index in indices or ():
        types[index] = "full_attention"
    types = read_layer_types(config, "layer_types", tuple(kinds), types)
    return replace(spec, layers=tuple(kinds[kind] for kind in types))


def _inner_size(config: ConfigJson) -> int:
    """Return the inner size of the feed-forward block, as transformers adjusts it."""
    size = config.integer("block_ff_dim", "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return size
    size = int(config.positive("block_ffn_dim_multiplier") * size)
    multiple = config.integer("block_multiple_of", default=256)
    return -(-size // multiple) * multiple


def read_moe(config: ConfigJson) -> ModelSpec:
    """Read LFM2 with experts in all layers but the first."""
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    config = config.filled({"hidden_act": "silu", "block_auto_adjust_ff_dim": False})
    block = experts(
        config,
        Routing(
            read_top_k(config, num_experts, "num_experts_per_tok"),
            "sigmoid",
            renormalize=config.flag("norm_topk_prob", True),
            epsilon=1e-6,
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=ExpertNames(
            router="feed_forward.gate",
            experts="feed_forward.experts.{}.",
            up=("w1", "w3"),
            down="w2",
            choice_bias="feed_forward.expert_bias"
            if config.flag("use_expert_bias", True)
            else None,
        ),
    )
    dense, spec = config.integer("num_dense_layers", default=2, least=0), read(config)
    made = {id(layer): layer.with_blocks([layer.blocks[0], block]) for layer in spec.layers}
    layers = (x if i < dense else made[id(x)] for i, x in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


ARCHITECTURES = {"Lfm2ForCausalLM": read, "Lfm2MoeForCausalLM": read_moe}
