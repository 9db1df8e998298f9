"""Granite 3 with experts: Granite with mixtures of experts, and possibly a block for all tokens."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.blocks.experts import ExpertsSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.granite import granite_like
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.",
    up=("input_linear.weight",),
    down="output_linear.weight",
    shared="shared_mlp.",
    shared_up=("input_linear",),
    shared_down="output_linear",
)
_SPLIT = replace(
    _NAMES,
    experts="block_sparse_moe.experts.{}.",
    up=("gate_proj", "up_proj"),
    down="down_proj",
    shared_up=("gate_proj", "up_proj"),
)
"""Modules of GGUF files."""


def granite_experts(config: ConfigJson, shared_inner: int = 0) -> ExpertsSpec:
    """Return the experts of all Granites; `shared_inner` as in `experts`."""
    num_experts = read_num_experts(config, "num_local_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    split = config.flag("split_experts", False)
    return experts(
        config,
        Routing(top_k, "none", softmax_chosen=True),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=_SPLIT if split else _NAMES,
        shared_inner=shared_inner,
        stacked="none" if split else "rows",
    )


def _read(config: ConfigJson, block: ExpertsSpec) -> ModelSpec:
    blocks = (block,) * read_num_layers(config)
    return replace(granite_like(config), feed_forwards=blocks).read(config)


def read(config: ConfigJson) -> ModelSpec:
    """Read Granite 3 with experts."""
    return _read(config, granite_experts(config))


def read_shared(config: ConfigJson) -> ModelSpec:
    """Read Granite with a block that all tokens use."""
    inner = config.integer("shared_intermediate_size", default=0, least=0)
    return _read(config, granite_experts(config, inner))


ARCHITECTURES = {"GraniteMoeForCausalLM": read, "GraniteMoeSharedForCausalLM": read_shared}
