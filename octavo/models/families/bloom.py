"""BLOOM: ALiBi positions, fused projections head by head, a norm after the embedding."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import Alibi
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.families.base import (
    DEFAULT_MAX_MODEL_LEN,
    Heads,
    read_num_heads,
    read_num_layers,
)
from octavo.models.families.gpt import GPTLike
from octavo.models.positions import alibi_slopes_bloom
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read BLOOM."""
    config.refuse(
        "apply_residual_connection_post_layernorm", False, "supported: residuals before the norm"
    )
    hidden = config.integer("n_embed", "hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config, "n_head"))
    eps = config.number("layer_norm_epsilon", default=1e-5)
    embed_norm = LayerNormSpec("transformer.word_embeddings_layernorm", hidden, eps)
    vocab_size, name = config.integer("vocab_size"), "transformer.word_embeddings"
    variant = GPTLike(
        heads=heads,
        num_layers=read_num_layers(config, "n_layer"),
        inner_size=4 * hidden,
        activation="gelu_tanh",
        eps=eps,
        positions=Alibi(alibi_slopes_bloom(heads.num_heads)),
        max_position=config.integer("seq_length", default=DEFAULT_MAX_MODEL_LEN),
        embed=EmbedSpec(name, vocab_size, hidden, hidden, norm=embed_norm),
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        qkv_modules=("self_attention.query_key_value",),
        o_module="self_attention.dense",
        mlp_modules=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norm_modules=("input_layernorm", "post_attention_layernorm"),
        final_norm="transformer.ln_f",
        qkv_layout="by_group",
        attention_bias=True,
        mlp_bias=True,
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"BloomForCausalLM": read}
