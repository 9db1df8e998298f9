"""Apertus: Llama with norms of queries and keys, and xIELU in an MLP without a gate."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec

_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0}
_ROPE |= {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0}
_ROPE |= {"high_freq_factor": 4.0}


def read(config: ConfigJson) -> ModelSpec:
    """Read Apertus."""
    config.refuse("hidden_act", "xielu", "supported: xielu")
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.replaced("rope_parameters", _ROPE)
    bias = config.flag("attention_bias", False)
    variant = LlamaLike(
        input_norm="attention_layernorm",
        feed_forward_norm="feedforward_layernorm",
        gate_up_modules=("mlp.up_proj",),
        gated=False,
        activation="xielu",
        alphas=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),
        ignored=(r".*\.mlp\.act_fn\.(beta|eps)",),  # the same constants in all models
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        ropes=(read_llama_rope(config, theta=12e6),) * read_num_layers(config),
    )
    return variant.read(config)


ARCHITECTURES = {"ApertusForCausalLM": read}
