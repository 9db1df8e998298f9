"""Nemotron 3 and 4, Minitron: layer norms with 1 added to the weight, and the square of ReLU."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Nemotron with attention in every layer."""
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        eps=config.number("norm_eps", default=1e-5),
        gate_up_modules=("mlp.up_proj",),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        ropes=(read_llama_rope(config, partial=0.5),) * read_num_layers(config),
    )
    return variant.read(config)


ARCHITECTURES = {"NemotronForCausalLM": read}
