"""OPT: learned positions; OPT-350m has norms after the residual and a narrow embedding."""

from __future__ import annotations

from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
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
    """Read OPT."""
    config.refuse("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    hidden = config.integer("hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config))
    embed_size = config.integer("word_embed_proj_dim", default=hidden)
    pre = config.flag("do_layer_norm_before", True)
    final_norm = pre and not config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.integer("max_position_embeddings")

    def project(module: str, outputs: int, inputs: int) -> LinearSpec | None:
        return None if outputs == inputs else LinearSpec(((module, outputs),), inputs)

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, 1e-5)

    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=bias),
            heads.o_proj("self_attn.out_proj", bias=bias),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            positions=None,
        ),
        plain_mlp(
            "fc1",
            "fc2",
            hidden,
            config.integer("ffn_dim"),
            read_activation(config, "activation_function", PLAIN, "relu"),
            bias=bias,
        ),
        norm("self_attn_layer_norm"),
        norm("final_layer_norm"),
        arrangement="sequential" if pre else "post",
    )
    embed = EmbedSpec(
        "model.decoder.embed_tokens",
        config.integer("vocab_size"),
        embed_size,
        hidden,
        project=project("model.decoder.project_in", hidden, embed_size),
        positions=PositionsSpec("model.decoder.embed_positions", positions, skipped=2),
    )
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config),
        head=HeadSpec(
            norm("model.decoder.final_layer_norm") if final_norm else None,
            read_lm_head(config, embed, tied=True),
            project=project("model.decoder.project_out", embed_size, hidden),
        ),
        max_model_len=positions,
        layer_names="model.decoder.layers.{}.",
        bare_prefix="model.",
    )


ARCHITECTURES = {"OPTForCausalLM": read}
