"""Phi-1, Phi-1.5 and Phi-2: parallel blocks, part of each head rotated, biases."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families.base import PLAIN, Heads, read_activation, read_num_layers
from octavo.models.families.gpt import GPTLike
from octavo.models.families.llama import read_llama_rope, read_max_position
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Phi-1, Phi-1.5 or Phi-2."""
    config.refuse("qk_layernorm", False, "norms on queries and keys are not supported for Phi")
    config.refuse("tie_word_embeddings", False, "supported: a separate LM head, with a bias")
    heads = Heads.read(config)
    hidden = heads.hidden_size
    variant = GPTLike(
        heads=heads,
        num_layers=read_num_layers(config),
        inner_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", PLAIN, "gelu_new"),
        eps=config.number("layer_norm_eps", default=1e-5),
        positions=read_llama_rope(config, partial=0.5),
        max_position=read_max_position(config),
        embed=EmbedSpec("model.embed_tokens", config.integer("vocab_size"), hidden, hidden),
        layer_names="model.layers.{}.",
        bare_prefix="model.",
        o_module="self_attn.dense",
        mlp_modules=("mlp.fc1", "mlp.fc2"),
        norm_modules=("input_layernorm", None),
        final_norm="model.final_layernorm",
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        arrangement="parallel",
        tied=False,
    )
    return variant.read(config)


ARCHITECTURES = {"PhiForCausalLM": read}
