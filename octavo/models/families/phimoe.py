"""Phi-3.5-MoE: experts weighted by SparseMixer, layer norms with biases, longrope."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.routing import Routing
from octavo.layers.rope_spec import RopeSpec
from octavo.models.families.base import read_num_layers
from octavo.models.families.experts import experts, read_num_experts, read_top_k
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.families.mixtral import NAMES
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Phi-3.5-MoE."""
    count, bias = read_num_layers(config), config.flag("attention_bias", False)
    num_experts = read_num_experts(config, "num_local_experts")
    config.refuse("num_experts_per_tok", 2, "SparseMixer chooses two experts")
    jitter = config.positive("router_jitter_noise", 0.01)
    block = experts(
        config,
        Routing(
            read_top_k(config, num_experts, "num_experts_per_tok"), "none", tolerance=2 * jitter
        ),
        num_experts=num_experts,
        inner=config.integer("intermediate_size"),
        names=NAMES,
    )
    spec = LlamaLike(
        norm="layer",
        norm_bias=True,
        eps=config.number("rms_norm_eps"),
        qkv_bias=bias,
        o_bias=bias,
        ropes=(_read_rope(config),) * count,
        windows=(config.optional_integer("sliding_window", least=1),) * count,
        feed_forwards=(block,) * count,
    ).read(config)
    assert spec.head.lm_head is not None
    lm_head = replace(spec.head.lm_head, bias=config.flag("lm_head_bias", False))
    return replace(spec, head=replace(spec.head, lm_head=lm_head))


def _read_rope(config: ConfigJson) -> RopeSpec:
    """Return the rotary positions. The factor of cosines and sines is a field, long_mscale.

    Raises:
        ModelError: short_mscale differs from long_mscale.
    """
    rope = read_llama_rope(config, theta=1e6, aliases={"su": "longrope"}, default_original=4096)
    if rope.rope_type == "default":
        return rope
    params = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    factor = params.number("long_mscale")
    params.refuse("short_mscale", factor, "it must be long_mscale")
    return replace(rope, attention_factor=factor)


ARCHITECTURES = {"PhiMoEForCausalLM": read, "PhimoeForCausalLM": read}
