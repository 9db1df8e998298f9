"""Falcon: parallel blocks, few heads of keys and values in a fused projection."""

from __future__ import annotations

from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import Alibi, AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.config_json import ConfigJson
from octavo.models.families.base import (
    PLAIN,
    ROTARY_TABLES,
    Heads,
    model_spec,
    plain_mlp,
    read_activation,
    read_lm_head,
    read_num_heads,
    read_num_layers,
)
from octavo.models.families.llama import read_max_position
from octavo.models.positions import alibi_slopes_bloom, read_rope, scaled_max_model_len
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Falcon 7B, 40B, 180B, Falcon 2 11B, and Falcon RW, which has ALiBi positions."""
    new = config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True)
    num_norms = config.integer("num_ln_in_parallel_attn", default=2 if new else 1, most=2)
    if new and not parallel:
        raise config.error("parallel_attn", "new_decoder_architecture=true needs true")
    if num_norms == 2 and not new:
        raise config.error("num_ln_in_parallel_attn", "2 needs new_decoder_architecture=true")
    hidden = config.integer("n_embed", "hidden_size")
    num_heads = read_num_heads(config, "n_head")
    num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    if new:
        num_kv_heads = config.integer("num_kv_heads", "n_head_kv", default=num_heads)
    heads = Heads.of(config, hidden, num_heads, num_kv_heads)
    max_position = read_max_position(config)
    positions: RopeSpec | Alibi
    if config.flag("alibi", False):
        # The factor on the scores applies to the bias, too. transformers rounds the bias to
        # bfloat16, whatever the model's dtype; here it is exact.
        slopes = alibi_slopes_bloom(heads.num_heads)
        positions = Alibi(tuple(heads.scale * slope for slope in slopes))
        max_model_len = max_position
    else:
        positions = read_rope(config, head_size=heads.head_size, max_position=max_position)
        max_model_len = scaled_max_model_len(positions, max_position)
    bias = config.flag("bias", False)
    eps = config.number("layer_norm_epsilon", default=1e-5)

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, eps)

    if num_norms == 2:
        input_norm, feed_forward_norm = norm("ln_attn"), norm("ln_mlp")
    else:
        input_norm, feed_forward_norm = norm("input_layernorm"), norm("post_attention_layernorm")
    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("self_attention.query_key_value", bias=bias, layout="by_group"),
            heads.o_proj("self_attention.dense", bias=bias),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            positions,
        ),
        plain_mlp(
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            hidden,
            config.integer("ffn_hidden_size", default=4 * hidden),
            read_activation(config, "activation", PLAIN, "gelu"),
            bias=bias,
        ),
        input_norm,
        feed_forward_norm if num_norms == 2 or not parallel else None,
        arrangement="parallel" if parallel else "sequential",
    )
    embed = EmbedSpec("transformer.word_embeddings", config.integer("vocab_size"), hidden, hidden)
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config, "n_layer"),
        head=HeadSpec(norm("transformer.ln_f"), read_lm_head(config, embed, tied=True)),
        max_model_len=max_model_len,
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES = {"FalconForCausalLM": read}
