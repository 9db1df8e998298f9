"""MiniMax M2: norms of all queries and keys of a token, partial rotation, experts everywhere."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.families.base import Heads, read_num_layers
from octavo.models.families.experts import (
    experts,
    read_draft_layers,
    read_num_experts,
    read_top_k,
)
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.families.mixtral import NAMES
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read MiniMax M2; layers that predict drafts are not computed."""
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    top_k = read_top_k(config, num_experts, "num_experts_per_tok")
    block = experts(
        config,
        Routing(top_k, "sigmoid", renormalize=True),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=replace(NAMES, choice_bias="block_sparse_moe.e_score_correction_bias"),
    )
    size, num_layers = Heads.read(config).head_size, read_num_layers(config)
    rotated = config.integer("rotary_dim", default=size, most=size)
    return LlamaLike(
        ropes=(read_llama_rope(config, theta=5e6, partial=rotated / size),) * num_layers,
        qk_norm="all",
        feed_forwards=(block,) * num_layers,
        ignored=(read_draft_layers(config, "num_mtp_modules"),),
    ).read(config)


ARCHITECTURES = {"MiniMaxM2ForCausalLM": read}
