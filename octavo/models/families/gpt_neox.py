"""GPT-NeoX, Pythia and Dolly 2: fused projections head by head, part of each head rotated."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norm import LayerNormSpec
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
from octavo.models.positions import read_rope, scaled_max_model_len
from octavo.models.spec import ModelSpec

_MASKS = (r"(.*\.)?attention\.(bias|masked_bias)",)


def read(config: ConfigJson) -> ModelSpec:
    """Read GPT-NeoX."""
    hidden = config.integer("hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config))
    rope = read_rope(
        config,
        head_size=heads.head_size,
        max_position=read_max_position(config),
        theta_field="rotary_emb_base",
        partial=config.number("rotary_pct", default=0.25),
    )
    eps = config.number("layer_norm_eps", default=1e-5)
    bias = config.flag("attention_bias", True)
    parallel = config.flag("use_parallel_residual", True)
    layer = LayerSpec.of(
        AttentionSpec(
            heads.qkv_proj("attention.query_key_value", bias=bias, layout="by_group"),
            heads.o_proj("attention.dense", bias=bias),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            rope,
        ),
        plain_mlp(
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            hidden,
            config.integer("intermediate_size"),
            read_activation(config, "hidden_act", PLAIN, "gelu"),
            bias=True,
        ),
        LayerNormSpec("input_layernorm", hidden, eps),
        LayerNormSpec("post_attention_layernorm", hidden, eps),
        arrangement="parallel" if parallel else "sequential",
    )
    embed = EmbedSpec("gpt_neox.embed_in", config.integer("vocab_size"), hidden, hidden)
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config),
        head=HeadSpec(
            LayerNormSpec("gpt_neox.final_layer_norm", hidden, eps),
            read_lm_head(config, embed, tied=False, module="embed_out"),
        ),
        max_model_len=scaled_max_model_len(rope, read_max_position(config)),
        layer_names="gpt_neox.layers.{}.",
        bare_prefix="gpt_neox.",
        ignored=(*ROTARY_TABLES, *_MASKS),
    )


ARCHITECTURES = {"GPTNeoXForCausalLM": read}
