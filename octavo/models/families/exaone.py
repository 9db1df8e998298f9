"""EXAONE 3, 3.5 and Deep: Llama with the names of GPT-2."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import GATED, read_activation, read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read EXAONE before version 4."""
    num_layers = read_num_layers(config, "num_layers")
    config = config.replaced("num_hidden_layers", num_layers)
    attention = "attn.attention"
    variant = LlamaLike(
        embed_module="transformer.wte",
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        input_norm="ln_1",
        feed_forward_norm="ln_2",
        final_norm="transformer.ln_f",
        qkv_modules=(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        o_module=f"{attention}.out_proj",
        gate_up_modules=("mlp.c_fc_0", "mlp.c_fc_1"),
        down_module="mlp.c_proj",
        eps=config.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        activation=read_activation(config, "activation_function", GATED, "silu"),
        ropes=(read_llama_rope(config, theta=5e5),) * num_layers,
    )
    return variant.read(config)


ARCHITECTURES = {"ExaoneForCausalLM": read}
