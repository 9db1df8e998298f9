"""DeepSeek V2, V3 and R1, Kimi K2, and GLM-4.7-Flash: latent attention and experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.attention import QueryScale
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.experts import (
    GROUPED,
    experts,
    read_grouped_experts,
    read_groups,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
)
from octavo.models.families.latent_parts import read_latent_attention, read_latent_rope
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read_latent(
    config: ConfigJson,
    block: ExpertsSpec | None,
    *,
    is_neox: bool,
    mlp_bias: bool = False,
    dense: int | None = None,
    query_scale: QueryScale | None = None,
) -> ModelSpec:
    """Return a model with latent attention.

    Args:
        config: config.json.
        block: the experts; None: all layers are dense.
        is_neox: as in `RopeSpec`.
        mlp_bias: True if dense feed-forward blocks have biases.
        dense: as for `read_sparse_layers`.
        query_scale: factor of the queries.
    """
    config.refuse("index_topk", None, "Octavo has no attention that chooses tokens with an indexer")
    layers = read_num_layers(config)
    rope = read_latent_rope(config, is_neox=is_neox)
    # Layers after the last one predict several tokens at once.
    more = config.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    ignored = tuple(rf"model\.layers\.{layers + i}\..*" for i in range(more))
    blocks = None if block is None else read_sparse_layers(config, block, dense=dense)
    variant = LlamaLike(
        ropes=(rope,) * layers, mlp_bias=mlp_bias, ignored=ignored, feed_forwards=blocks
    )
    attention = replace(read_latent_attention(config, rope), query_scale=query_scale)
    return variant.read(config, attention)


def _has_experts(config: ConfigJson) -> bool:
    """Return True if a layer is not among the first, dense ones."""
    return config.integer("first_k_dense_replace", least=0) < read_num_layers(config)


def _read_v2_experts(config: ConfigJson) -> ExpertsSpec:
    """Return experts that are chosen by the softmax, from the groups with the best experts."""
    config.refuse("norm_topk_prob", False, "the published models do not renormalize weights")
    methods = {"greedy": "", "group_limited_greedy": "groups"}
    limited = config.choice("topk_method", methods, "greedy") == "groups"
    num_experts = read_num_experts(config, "n_routed_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    groups, top_groups = read_groups(config, num_experts, top_k, least=1) if limited else (1, 1)
    inner = config.integer("moe_intermediate_size")
    return experts(
        config,
        Routing(
            top_k,
            "softmax",
            groups=groups,
            top_groups=top_groups,
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
        num_experts=num_experts,
        inner=inner,
        names=replace(GROUPED, choice_bias=None),
        shared_inner=config.integer("n_shared_experts", default=0, least=0) * inner,
    )


def read_v2(config: ConfigJson) -> ModelSpec:
    """Read DeepSeek V2."""
    block = _read_v2_experts(config) if _has_experts(config) else None
    return read_latent(config, block, is_neox=False, mlp_bias=config.flag("mlp_bias", False))


def read_v3(config: ConfigJson) -> ModelSpec:
    """Read DeepSeek V3."""
    config.refuse("scoring_func", "sigmoid", "experts are chosen by sigmoid scores")
    config.refuse("topk_method", "noaux_tc", "experts are chosen with a bias, from the best groups")
    config.refuse("moe_layer_freq", 1, "all layers after the first, dense ones have experts")
    block = read_grouped_experts(config) if _has_experts(config) else None
    return read_latent(config, block, is_neox=not config.flag("rope_interleave", True))


def read_glm_lite(config: ConfigJson) -> ModelSpec:
    """Read GLM-4.7-Flash; the first layer is dense."""
    is_neox = not config.flag("rope_interleave", True)
    return read_latent(config, read_grouped_experts(config), is_neox=is_neox, dense=1)


ARCHITECTURES = {
    "DeepseekV2ForCausalLM": read_v2,
    "DeepseekV3ForCausalLM": read_v3,
    "Glm4MoeLiteForCausalLM": read_glm_lite,
    "KimiK25ForConditionalGeneration": text_part(read_v3),
    "Kimi_K25ForConditionalGeneration": text_part(read_v3),
}
