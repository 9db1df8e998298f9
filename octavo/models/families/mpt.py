"""MPT: ALiBi positions, no biases, optional clipping of queries, keys and values."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import Alibi
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families import base
from octavo.models.families.gpt import GPTLike
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
    num_layers = base.read_num_layers(config, "n_layers")
    heads = base.Heads.of(config, hidden, base.read_num_heads(config, "n_heads"))
    bias_max = attention.number("alibi_bias_max", default=8.0)
    variant = GPTLike(
        heads=heads,
        num_layers=num_layers,
        inner_size=config.integer("expansion_ratio", default=4) * hidden,
        activation="gelu",
        eps=config.number("layer_norm_epsilon", default=1e-5),
        positions=Alibi(alibi_slopes_mpt(heads.num_heads, bias_max)),
        max_position=config.integer("max_seq_len", default=base.DEFAULT_MAX_MODEL_LEN),
        embed=EmbedSpec("transformer.wte", config.integer("vocab_size"), hidden, hidden),
        layer_names="transformer.blocks.{}.",
        bare_prefix="transformer.",
        qkv_modules=("attn.Wqkv",),
        o_module="attn.out_proj",
        mlp_modules=("ffn.up_proj", "ffn.down_proj"),
        norm_modules=("norm_1", "norm_2"),
        final_norm="transformer.norm_f",
        norm_bias=False,
        scales=(attention.number("softmax_scale", default=heads.scale),) * num_layers,
        clip=attention.optional_number("clip_qkv"),
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"MPTForCausalLM": read, "MptForCausalLM": read}
