"""MiniCPM 1, 2 and 4: Llama with factors on embedding, residuals and logits."""

from __future__ import annotations

import math

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read a dense MiniCPM."""
    config.refuse(
        "sparse_config",
        None,
        "sparse attention is not supported; set it to null in hf_overrides for full attention",
    )
    depth = config.number("scale_depth", default=1.0)
    width = config.integer("hidden_size") / config.integer("dim_model_base", default=1)
    variant = LlamaLike(
        residual_multiplier=depth / math.sqrt(read_num_layers(config)),
        embed_scale=config.number("scale_emb", default=1.0),
        logit_scale=1 / width,
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"MiniCPMForCausalLM": read}
