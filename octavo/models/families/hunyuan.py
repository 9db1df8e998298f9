"""HunYuan, dense or with experts: norms of each head of queries and keys, after their rotation."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")


def _hunyuan_like(config: ConfigJson) -> LlamaLike:
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_modules=("query_layernorm", "key_layernorm"),
        norms_rotated=True,
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read HunYuan, dense."""
    return _hunyuan_like(config).read(config)


def read_experts(config: ConfigJson) -> ModelSpec:
    """Read HunYuan with experts; moe_topk may have a number for each layer."""
    num_layers, num_experts = read_num_layers(config), read_num_experts(config, "num_experts")
    inner, counts = config.integer("intermediate_size"), config.get("moe_topk")
    if not isinstance(counts, list):
        counts = [counts] * num_layers
    if len(counts) != num_layers:
        raise config.error("moe_topk", f"it must have one number for each of {num_layers} layers")

    block = experts(
        config,
        Routing(1, "softmax", renormalize=True),
        num_experts=num_experts,
        inner=inner,
        names=_NAMES,
        shared_inner=inner,
    )

    def with_count(count: object) -> ExpertsSpec:
        top_k = read_top_k(config.replaced("moe_topk", count), num_experts, "moe_topk")
        routing = replace(block.router.routing, top_k=top_k)
        return replace(block, router=replace(block.router, routing=routing))

    blocks = {repr(count): with_count(count) for count in counts}
    feed_forwards = tuple(blocks[repr(count)] for count in counts)
    return replace(_hunyuan_like(config), feed_forwards=feed_forwards).read(config)


ARCHITECTURES = {"HunYuanDenseV1ForCausalLM": read, "HunYuanMoEV1ForCausalLM": read_experts}
