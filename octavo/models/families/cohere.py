"""Cohere's Command: parallel blocks, layer norms, rotated neighbours, scaled logits, experts.

"Rotated neighbours" are the pairs (2 i, 2 i + 1) of a head; see `RopeSpec.is_neox`.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.sum import SumSpec, Term
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.experts import (
    GROUPED,
    experts,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def _cohere_like(config: ConfigJson) -> LlamaLike:
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        arrangement="parallel",
        feed_forward_norm=None,
        norm="layer",
        qkv_bias=bias,
        o_bias=bias,
        tied=True,
        logit_scale=config.number("logit_scale", default=0.0625),
        # Command R states its training context here.
        max_model_len=config.optional_integer("model_max_length", least=1),
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read Command R and Command R+."""
    rope = read_llama_rope(config, theta=5e5, is_neox=False)
    variant = replace(
        _cohere_like(config),
        ropes=(rope,) * read_num_layers(config),
        qk_norm="own" if config.flag("use_qk_norm", False) else "none",
    )
    return variant.read(config)


def read_cohere2(config: ConfigJson) -> ModelSpec:
    """Read Command R7B and Command A: sliding windows; layers without one have no positions."""
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    layer_types = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(read_num_layers(config))
    ]
    windows = read_windows(config, layer_types, config.integer("sliding_window", default=4096))
    rope = read_llama_rope(config, is_neox=False)
    variant = replace(
        _cohere_like(config),
        windows=windows,
        ropes=tuple(None if window is None else rope for window in windows),
    )
    return variant.read(config)


def _read_experts(config: ConfigJson) -> BlockSpec:
    num_experts = read_num_experts(config, "num_experts")
    inner = config.integer("intermediate_size")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    kinds = {
        "softmax": Routing(top_k, "none", softmax_chosen=True),
        "sigmoid": Routing(top_k, "sigmoid", renormalize=config.flag("norm_topk_prob", True)),
    }
    kind = config.choice("expert_selection_fn", {name: name for name in kinds}, "softmax")
    shared = config.integer("num_shared_experts", default=0, least=0)
    combined = {"average": "average", "sum": "sum"}
    combination = config.choice("shared_expert_combination_strategy", combined, "average")
    block = experts(
        config,
        kinds[kind],
        num_experts=num_experts,
        inner=inner,
        names=replace(GROUPED, choice_bias=None),
        shared_inner=shared * inner,
    )
    if shared and combination == "average":
        return SumSpec((Term("experts", block, result_factor=0.5),))
    return block


def read_experts(config: ConfigJson) -> ModelSpec:
    """Read Command with experts; its first layers may have a dense block and other windows."""
    num_layers = read_num_layers(config)
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    first = config.integer("prefix_dense_sliding_window_pattern", default=1)
    period = config.integer("sliding_window_pattern", default=4)
    places = [(i + 1, first) if i < dense else (i - dense + 1, period) for i in range(num_layers)]
    kinds = ["sliding_attention" if n % every else "full_attention" for n, every in places]
    windows = read_windows(config, kinds, config.integer("sliding_window", default=4096))
    feed_forwards = read_sparse_layers(config, _read_experts(config))
    rope = read_llama_rope(config, is_neox=False)
    variant = replace(
        _cohere_like(config),
        norm="rms" if config.has("rms_norm_eps") else "layer",
        windows=windows,
        ropes=tuple(
            rope if window is not None or (block is None and first == 1) else None
            for window, block in zip(windows, feed_forwards, strict=True)
        ),
        feed_forwards=feed_forwards,
    )
    inner = config.integer("prefix_dense_intermediate_size", "intermediate_size")
    return variant.read(config.replaced("intermediate_size", inner))


ARCHITECTURES = {
    "CohereForCausalLM": read,
    "Cohere2ForCausalLM": read_cohere2,
    "Cohere2MoeForCausalLM": read_experts,
}
