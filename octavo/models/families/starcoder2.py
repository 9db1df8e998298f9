"""StarCoder2: layer norms, a plain MLP and biases on rotary attention."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families.base import PLAIN, Heads, read_activation, read_num_layers
from octavo.models.families.gpt import GPTLike
from octavo.models.families.llama import read_llama_rope, read_max_position
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read StarCoder2."""
    heads = Heads.read(config)
    hidden = heads.hidden_size
    bias = config.flag("use_bias", True)
    variant = GPTLike(
        heads=heads,
        num_layers=read_num_layers(config),
        inner_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", PLAIN, "gelu_pytorch_tanh"),
        eps=config.number("norm_epsilon", default=1e-5),
        positions=read_llama_rope(config),
        max_position=read_max_position(config),
        embed=EmbedSpec("model.embed_tokens", config.integer("vocab_size"), hidden, hidden),
        layer_names="model.layers.{}.",
        bare_prefix="model.",
        o_module="self_attn.o_proj",
        mlp_modules=("mlp.c_fc", "mlp.c_proj"),
        norm_modules=("input_layernorm", "post_attention_layernorm"),
        final_norm="model.norm",
        attention_bias=bias,
        mlp_bias=bias,
        window=config.optional_integer("sliding_window", least=1),
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"Starcoder2ForCausalLM": read}
