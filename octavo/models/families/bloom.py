"""BLOOM: ALiBi positions, fused projections head by head, a norm after the embedding."""

from __future__ import annotations

from octavo.models.blocks.attention import Alibi, AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.config_json import ConfigJson
from octavo.models.families.base import (
    DEFAULT_MAX_MODEL_LEN,
    Heads,
    model_spec,
    plain_mlp,
    read_lm_head,
    read_num_heads,
    read_num_layers,
)
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

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, eps)

    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("self_attention.query_key_value", bias=True, layout="by_group"),
            heads.o_proj("self_attention.dense", bias=True),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            Alibi(alibi_slopes_bloom(heads.num_heads)),
        ),
        plain_mlp(
            "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, 4 * hidden, "gelu_tanh", bias=True
        ),
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
    )
    embed = EmbedSpec(
        "transformer.word_embeddings",
        config.integer("vocab_size"),
        hidden,
        hidden,
        norm=norm("transformer.word_embeddings_layernorm"),
    )
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config, "n_layer"),
        head=HeadSpec(norm("transformer.ln_f"), read_lm_head(config, embed, tied=True)),
        max_model_len=config.integer("seq_length", default=DEFAULT_MAX_MODEL_LEN),
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
    )


ARCHITECTURES = {"BloomForCausalLM": read}
