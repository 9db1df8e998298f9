"""StarCoder2: layer norms, a plain MLP and biases on rotary attention."""

from __future__ import annotations

from octavo.models.blocks.attention import AttentionSpec
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
    read_num_layers,
    visible,
)
from octavo.models.families.llama import read_llama_rope, read_max_position
from octavo.models.positions import scaled_max_model_len
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read StarCoder2."""
    heads = Heads.read(config)
    hidden = heads.hidden_size
    rope = read_llama_rope(config)
    max_model_len = scaled_max_model_len(rope, read_max_position(config))
    bias = config.flag("use_bias", True)
    eps = config.number("norm_epsilon", default=1e-5)

    def norm(module: str) -> LayerNormSpec:
        return LayerNormSpec(module, hidden, eps)

    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=bias),
            heads.o_proj("self_attn.o_proj", bias=bias),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            rope,
            sliding_window=visible(
                config.optional_integer("sliding_window", least=1), max_model_len
            ),
        ),
        plain_mlp(
            "mlp.c_fc",
            "mlp.c_proj",
            hidden,
            config.integer("intermediate_size"),
            read_activation(config, "hidden_act", PLAIN, "gelu_pytorch_tanh"),
            bias=bias,
        ),
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
    )
    embed = EmbedSpec("model.embed_tokens", config.integer("vocab_size"), hidden, hidden)
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config),
        head=HeadSpec(norm("model.norm"), read_lm_head(config, embed, tied=True)),
        max_model_len=max_model_len,
        layer_names="model.layers.{}.",
        bare_prefix="model.",
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES = {"Starcoder2ForCausalLM": read}
