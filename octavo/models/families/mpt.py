"""MPT: ALiBi positions, no biases, optional clipping of queries, keys and values."""

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
from octavo.models.positions import alibi_slopes_mpt
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read MPT."""
    config.refuse("no_bias", True, "supported: MPT without biases")
    config.refuse("logit_scale", None, "a scale on the logits is not supported")
    attention = config.section("attn_config")
    attention.refuse("attn_type", "multihead_attention", "supported: multihead_attention")
    attention.refuse("alibi", True, "supported: ALiBi positions")
    attention.refuse("prefix_lm", False, "only causal attention is supported")
    attention.refuse("qk_ln", False, "norms on queries and keys are not supported for MPT")
    attention.refuse("rope", False, "supported: ALiBi positions")
    attention.refuse("sliding_window_size", -1, "sliding windows are not supported for MPT")
    feed_forward = config.section("ffn_config")
    feed_forward.refuse("ffn_type", "mptmlp", "supported: mptmlp")
    feed_forward.refuse("ffn_act_fn", None, "supported: gelu")
    if config.get("norm_type") not in (None, "layernorm", "low_precision_layernorm"):
        raise config.error("norm_type", "supported: layernorm, low_precision_layernorm")
    hidden = config.integer("d_model", "hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config, "n_heads"))
    eps = config.number("layer_norm_epsilon", default=1e-5)
    inner = config.integer("expansion_ratio", default=4) * hidden

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, eps, bias=False)

    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("attn.Wqkv", bias=False),
            heads.o_proj("attn.out_proj", bias=False),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            attention.number("softmax_scale", default=heads.scale),
            Alibi(
                alibi_slopes_mpt(heads.num_heads, attention.number("alibi_bias_max", default=8.0))
            ),
            clip=attention.optional_number("clip_qkv"),
        ),
        plain_mlp("ffn.up_proj", "ffn.down_proj", hidden, inner, "gelu", bias=False),
        norm("norm_1"),
        norm("norm_2"),
    )
    embed = EmbedSpec("transformer.wte", config.integer("vocab_size"), hidden, hidden)
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config, "n_layers"),
        head=HeadSpec(norm("transformer.norm_f"), read_lm_head(config, embed, tied=True)),
        max_model_len=config.integer("max_seq_len", default=DEFAULT_MAX_MODEL_LEN),
        layer_names="transformer.blocks.{}.",
        bare_prefix="transformer.",
    )


ARCHITECTURES = {"MPTForCausalLM": read, "MptForCausalLM": read}
