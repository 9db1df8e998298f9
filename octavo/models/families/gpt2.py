"""GPT-2: learned positions, weights stored as Conv1D."""

from __future__ import annotations

from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.config_json import ConfigJson
from octavo.models.families.base import (
    PLAIN,
    Heads,
    model_spec,
    plain_mlp,
    read_activation,
    read_lm_head,
    read_num_heads,
    read_num_layers,
)
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read GPT-2."""
    config.refuse("add_cross_attention", False, "cross attention is not supported")
    hidden = config.integer("n_embd", "hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config, "n_head"))
    positions = config.integer("n_positions", "max_position_embeddings")
    scale = heads.scale if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    eps = config.number("layer_norm_epsilon", default=1e-5)
    mlp = plain_mlp(
        "mlp.c_fc",
        "mlp.c_proj",
        hidden,
        config.integer("n_inner", default=4 * hidden),
        read_activation(config, "activation_function", PLAIN, "gelu_new"),
        bias=True,
        layout="conv1d",
    )

    def layer(index: int) -> LayerSpec:
        attention = AttentionSpec(
            heads.qkv_proj("attn.c_attn", bias=True, layout="conv1d"),
            heads.o_proj("attn.c_proj", bias=True, layout="conv1d"),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            scale / (index + 1 if by_layer else 1),
            positions=None,
        )
        norms = LayerNormSpec("ln_1", hidden, eps), LayerNormSpec("ln_2", hidden, eps)
        return LayerSpec(attention, mlp, *norms)

    embed = EmbedSpec(
        "transformer.wte",
        config.integer("vocab_size"),
        hidden,
        hidden,
        positions=PositionsSpec("transformer.wpe", positions),
    )
    return model_spec(
        config,
        embed=embed,
        layers=[layer(i) for i in range(read_num_layers(config, "n_layer"))],
        head=HeadSpec(
            LayerNormSpec("transformer.ln_f", hidden, eps), read_lm_head(config, embed, tied=True)
        ),
        max_model_len=positions,
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        ignored=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    )


ARCHITECTURES = {"GPT2LMHeadModel": read}
