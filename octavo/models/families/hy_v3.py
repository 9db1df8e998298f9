"""Hy3: norms of heads, and experts chosen by sigmoid scores with a bias."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import (
    ExpertNames,
    read_biased_experts,
    read_draft_layers,
    read_sparse_layers,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(
    router="mlp.router.gate", shared="mlp.shared_mlp.", choice_bias="mlp.expert_bias"
)


def read(config: ConfigJson) -> ModelSpec:
    """Read Hy3; layers after the last predict drafts and are not computed."""
    config.refuse("mlp_bias", False, "experts with biases are not supported")
    num_layers, bias = read_num_layers(config), config.flag("attention_bias", False)
    scale = config.number("router_scaling_factor", default=1.0)
    block = read_biased_experts(config, _NAMES, scale=scale)
    return LlamaLike(
        ropes=(read_llama_rope(config, theta=11158840.0),) * num_layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        feed_forwards=read_sparse_layers(config, block, dense=1),
        ignored=(read_draft_layers(config),),
    ).read(config)


ARCHITECTURES = {"HYV3ForCausalLM": read}
