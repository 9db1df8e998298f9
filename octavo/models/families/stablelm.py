"""StableLM 2 and StableLM 3B: layer norms, part of each head rotated, a gated MLP."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read StableLM."""
    parallel = config.flag("use_parallel_residual", False)
    variant = LlamaLike(
        arrangement="parallel" if parallel else "sequential",
        feed_forward_norm=None if parallel else "post_attention_layernorm",
        norm="layer",
        norm_bias=True,
        qkv_bias=config.flag("use_qkv_bias", False),
        qk_norm="own" if config.flag("qk_layernorm", False) else "none",
        qk_norm_modules=("q_layernorm.norms.{}", "k_layernorm.norms.{}"),
        ropes=(read_llama_rope(config, partial=0.25),) * read_num_layers(config),
    )
    return variant.read(config)


ARCHITECTURES = {"StableLmForCausalLM": read}
