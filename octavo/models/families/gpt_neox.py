"""GPT-NeoX, Pythia and Dolly 2: fused projections head by head, part of each head rotated."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families.base import (
    PLAIN,
    Heads,
    read_activation,
    read_num_heads,
    read_num_layers,
)
from octavo.models.families.gpt import GPTLike
from octavo.models.families.llama import read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read GPT-NeoX."""
    hidden = config.integer("hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config))
    bias = config.flag("attention_bias", True)
    variant = GPTLike(
        heads=heads,
        num_layers=read_num_layers(config),
        positions=read_rope(
            config,
            head_size=heads.head_size,
            max_position=read_max_position(config),
            theta_field="rotary_emb_base",
            partial=config.number("rotary_pct", default=0.25),
        ),
        max_position=read_max_position(config),
        inner_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", PLAIN, "gelu"),
        eps=config.number("layer_norm_eps", default=1e-5),
        embed=EmbedSpec("gpt_neox.embed_in", config.integer("vocab_size"), hidden, hidden),
        layer_names="gpt_neox.layers.{}.",
        bare_prefix="gpt_neox.",
        qkv_modules=("attention.query_key_value",),
        o_module="attention.dense",
        mlp_modules=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norm_modules=("input_layernorm", "post_attention_layernorm"),
        final_norm="gpt_neox.final_layer_norm",
        head_module="embed_out",
        masks=(r"(.*\.)?attention\.(bias|masked_bias)",),
        qkv_layout="by_group",
        attention_bias=bias,
        mlp_bias=True,
        arrangement="parallel" if config.flag("use_parallel_residual", True) else "sequential",
        tied=False,
    )
    return variant.read(config)


ARCHITECTURES = {"GPTNeoXForCausalLM": read}
