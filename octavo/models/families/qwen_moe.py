"""Qwen2-MoE and Qwen3-MoE: Qwen with mixtures of experts in most layers."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import (
    ExpertNames,
    experts,
    read_indices,
    read_num_experts,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike, read_qwen_windows
from octavo.models.spec import ModelSpec


def read_feed_forwards(config: ConfigJson, block: ExpertsSpec) -> tuple[ExpertsSpec | None, ...]:
    """Return the experts of each layer; None for layers with a dense block."""
    dense = read_indices(config, "mlp_only_layers")
    step = config.integer("decoder_sparse_step", default=1)
    return tuple(
        None if i in dense or (i + 1) % step else block for i in range(read_num_layers(config))
    )


def read_routing(config: ConfigJson, num_experts: int, *, renormalize: bool) -> Routing:
    """Return the routing: the softmax of all logits, renormalized if norm_topk_prob says so."""
    return Routing(
        read_top_k(config, num_experts, "num_experts_per_tok"),
        "softmax",
        renormalize=config.flag("norm_topk_prob", renormalize),
    )


def read_qwen2(config: ConfigJson) -> ModelSpec:
    """Read Qwen2-MoE, which has a block for all tokens in addition."""
    num_experts = read_num_experts(config, "num_experts")
    block = experts(
        config,
        read_routing(config, num_experts, renormalize=False),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
        names=ExpertNames(shared_gate="mlp.shared_expert_gate"),
        shared_inner=config.integer("shared_expert_intermediate_size"),
    )
    return LlamaLike(
        windows=read_qwen_windows(config),
        qkv_bias=config.flag("qkv_bias", True),
        feed_forwards=read_feed_forwards(config, block),
    ).read(config)


def read_qwen3(config: ConfigJson) -> ModelSpec:
    """Read Qwen3-MoE."""
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    block = experts(
        config,
        read_routing(config, num_experts, renormalize=False),
        num_experts=num_experts,
        inner=config.integer("moe_intermediate_size"),
    )
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        windows=read_qwen_windows(config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        feed_forwards=read_feed_forwards(config, block),
    ).read(config)


ARCHITECTURES = {"Qwen2MoeForCausalLM": read_qwen2, "Qwen3MoeForCausalLM": read_qwen3}
