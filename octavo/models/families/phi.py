"""Phi-1, Phi-1.5 and Phi-2: parallel blocks, part of each head rotated, biases."""

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
)
from octavo.models.families.llama import read_llama_rope, read_max_position
from octavo.models.positions import scaled_max_model_len
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Phi-1, Phi-1.5 or Phi-2."""
    config.refuse("qk_layernorm", False, "norms on queries and keys are not supported for Phi")
    config.refuse("tie_word_embeddings", False, "supported: a separate LM head, with a bias")
    heads = Heads.read(config)
    hidden = heads.hidden_size
    rope = read_llama_rope(config, partial=0.5)
    eps = config.number("layer_norm_eps", default=1e-5)
    layer = LayerSpec(
        AttentionSpec(
            heads.qkv_proj("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=True),
            heads.o_proj("self_attn.dense", bias=True),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            rope,
        ),
        plain_mlp(
            "mlp.fc1",
            "mlp.fc2",
            hidden,
            config.integer("intermediate_size"),
            read_activation(config, "hidden_act", PLAIN, "gelu_new"),
            bias=True,
        ),
        LayerNormSpec("input_layernorm", hidden, eps),
        feed_forward_norm=None,
        arrangement="parallel",
    )
    embed = EmbedSpec("model.embed_tokens", config.integer("vocab_size"), hidden, hidden)
    return model_spec(
        config,
        embed=embed,
        layers=(layer,) * read_num_layers(config),
        head=HeadSpec(
            LayerNormSpec("model.final_layernorm", hidden, eps),
            read_lm_head(config, embed, tied=False, bias=True),
        ),
        max_model_len=scaled_max_model_len(rope, read_max_position(config)),
        layer_names="model.layers.{}.",
        bare_prefix="model.",
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES = {"PhiForCausalLM": read}
