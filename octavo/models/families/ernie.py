"""ERNIE 4.5, dense or with experts: Llama with one switch for all biases.

It rotates pairs of neighbours in a head, and the text part of PaddleOCR-VL rotates halves (see
`RopeSpec.is_neox`). PaddleOCR-VL's positions have several parts, which are equal in texts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.models.families.base import read_num_layers, text_part
from octavo.models.families.experts import ExpertNames, experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_NAMES = ExpertNames(
    shared="mlp.shared_experts.", choice_bias="mlp.moe_statics.e_score_correction_bias"
)


def _ernie_like(config: ConfigJson, *, is_neox: bool) -> LlamaLike:
    bias = config.flag("use_bias", False)
    rope = read_llama_rope(config, theta=5e5, is_neox=is_neox, aliases={"mrope": "default"})
    return LlamaLike(
        ropes=(rope,) * read_num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=True,
    )


def read(config: ConfigJson, *, is_neox: bool = False) -> ModelSpec:
    """Read ERNIE 4.5; `is_neox`: rotate halves of heads, not neighbours."""
    return _ernie_like(config, is_neox=is_neox).read(config)


def read_experts(config: ConfigJson) -> ModelSpec:
    """Read ERNIE 4.5 with experts in some layers; parts that predict drafts are not computed."""
    config.refuse("use_bias", False, "experts with biases are not supported")
    num_experts, num_layers = read_num_experts(config, "moe_num_experts"), read_num_layers(config)
    inner = config.integer("moe_intermediate_size")
    shared = config.integer("moe_num_shared_experts", default=0, least=0)
    block = experts(
        config,
        Routing(
            read_top_k(config, num_experts, "moe_k"),
            "softmax",
            renormalize=True,
            least=config.number("moe_norm_min", default=1e-12),
        ),
        num_experts=num_experts,
        inner=inner,
        names=_NAMES,
        shared_inner=shared * inner,
    )
    block = replace(block, router=replace(block.router, choice_bias_is_row=True))
    step = config.integer("moe_layer_interval", default=1)
    first = config.integer("moe_layer_start_index", default=1, least=0)
    last = config.integer("moe_layer_end_index", default=-1, least=-1)
    last = num_layers - 1 if last == -1 else last
    has_experts = [first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]
    return replace(
        _ernie_like(config, is_neox=False),
        feed_forwards=tuple(block if value else None for value in has_experts),
        ignored=(r".*mtp.*",),
    ).read(config)


ARCHITECTURES = {
    "Ernie4_5ForCausalLM": read,
    "Ernie4_5_MoeForCausalLM": read_experts,
    "PaddleOCRVLForConditionalGeneration": text_part(partial(read, is_neox=True)),
}
