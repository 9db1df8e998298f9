"""CWM: Llama 3 with sliding windows in three of four layers."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0}
_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(config: ConfigJson) -> ModelSpec:
    """Read CWM."""
    num_layers = read_num_layers(config)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.replaced("rope_parameters", _ROPE)
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    variant = LlamaLike(
        windows=read_windows(config, kinds, config.optional_integer("sliding_window", least=1)),
        ropes=(read_llama_rope(config, theta=1e6),) * num_layers,
        mlp_bias=config.flag("mlp_bias", False),
    )
    return variant.read(config)


ARCHITECTURES = {"CwmForCausalLM": read}
