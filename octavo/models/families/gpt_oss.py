"""gpt-oss: experts with biases and a clamped activation, sinks, windows in every other layer."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.experts import (
    ExpertNames,
    experts,
    has_modules_of_experts,
    read_num_experts,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(router="mlp.router", experts="mlp.experts.", up=("gate_up_proj",))
_SPLIT = ExpertNames(router="mlp.router")
"""Modules of files in which each expert has matrices of its own."""


def read(config: ConfigJson) -> ModelSpec:
    """Read gpt-oss."""
    config.refuse("swiglu_alpha", 1.702, "the factor in the sigmoid is 1.702")
    split = has_modules_of_experts(config)
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok", "experts_per_token")
    block = experts(
        config,
        Routing(top_k, "none", softmax_chosen=True),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=_SPLIT if split else _NAMES,
        bias=True,
        router_bias=True,
        activation=ExpertActivation("swigluoai", limit=config.positive("swiglu_limit", 7.0)),
        stacked="none" if split else "conv1d",
        alternate=not split,
    )
    num_layers = read_num_layers(config)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    bias = config.flag("attention_bias", True)
    return LlamaLike(
        qkv_bias=bias,
        o_bias=bias,
        windows=read_windows(config, kinds, config.optional_integer("sliding_window", least=1)),
        ropes=(read_llama_rope(config, theta=150000.0),) * num_layers,
        sinks="self_attn.sinks",
        feed_forwards=(block,) * num_layers,
    ).read(config)


ARCHITECTURES = {"GptOssForCausalLM": read}
