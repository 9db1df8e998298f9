"""OLMoE: norms of all queries and keys of a token, and experts in each layer."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import experts, read_num_experts
from octavo.models.families.llama import LlamaLike
from octavo.models.families.qwen_moe import read_routing
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read OLMoE."""
    config.refuse("clip_qkv", None, "limits of normed queries and keys are not supported")
    num_experts = read_num_experts(config, "num_experts")
    block = experts(
        config,
        read_routing(config, num_experts, renormalize=False),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
    )
    bias = config.flag("attention_bias", False)
    return LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
        feed_forwards=(block,) * read_num_layers(config),
    ).read(config)


ARCHITECTURES = {"OlmoeForCausalLM": read}
