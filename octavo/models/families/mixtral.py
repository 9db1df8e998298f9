"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec

NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{}.",
    up=("w1", "w3"),
    down="w2",
)


def read(config: ConfigJson) -> ModelSpec:
    """Read Mixtral."""
    num_experts = read_num_experts(config, "num_local_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    block = experts(
        config,
        Routing(top_k, "softmax", renormalize=True),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=NAMES,
    )
    num_layers = read_num_layers(config)
    window = config.optional_integer("sliding_window", least=1)
    windows = None if window is None else (window,) * num_layers
    return LlamaLike(windows=windows, feed_forwards=(block,) * num_layers).read(config)


ARCHITECTURES = {"MixtralForCausalLM": read}
