"""Falcon: parallel blocks, few heads of keys and values in a fused projection."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import Alibi
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families import base
from octavo.models.families.gpt import GPTLike
from octavo.models.families.llama import read_max_position
from octavo.models.positions import alibi_slopes_bloom, read_rope
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
    hidden, vocab_size = config.integer("n_embed", "hidden_size"), config.integer("vocab_size")
    num_heads = base.read_num_heads(config, "n_head")
    multi_query = config.flag("multi_query", True) and not new
    most = config.integer("num_kv_heads", "n_head_kv", default=num_heads) if new else num_heads
    heads = base.Heads.of(config, hidden, num_heads, 1 if multi_query else most)
    size, max_position = heads.head_size, read_max_position(config)
    # The factor on the scores applies to the bias, too, which transformers rounds to bfloat16.
    slopes = tuple(heads.scale * slope for slope in alibi_slopes_bloom(num_heads))
    alibi, bias = config.flag("alibi", False), config.flag("bias", False)
    rope = None if alibi else read_rope(config, head_size=size, max_position=max_position)
    one_norm = "input_layernorm", None if parallel else "post_attention_layernorm"
    variant = GPTLike(
        heads=heads,
        num_layers=base.read_num_layers(config, "n_layer"),
        inner_size=config.integer("ffn_hidden_size", default=4 * hidden),
        activation=base.read_activation(config, "activation", base.PLAIN, "gelu"),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        positions=rope or Alibi(slopes),
        max_position=max_position,
        embed=EmbedSpec("transformer.word_embeddings", vocab_size, hidden, hidden),
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        qkv_modules=("self_attention.query_key_value",),
        o_module="self_attention.dense",
        mlp_modules=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norm_modules=("ln_attn", "ln_mlp") if num_norms == 2 else one_norm,
        final_norm="transformer.ln_f",
        qkv_layout="by_group",
        attention_bias=bias,
        mlp_bias=bias,
        arrangement="parallel" if parallel else "sequential",
        tied=True,
    )
    return variant.read(config)


ARCHITECTURES = {"FalconForCausalLM": read}
