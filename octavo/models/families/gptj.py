"""GPT-J and CodeGen: parallel blocks, rotated neighbours in part of each head, biased logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.families.base import (
    PLAIN,
    Heads,
    read_activation,
    read_num_heads,
    read_num_layers,
)
from octavo.models.families.gpt import GPTLike
from octavo.models.spec import ModelSpec

_SHARDS = 4
"""Number of parts of the heads in CodeGen's fused projection: one for each training device."""


def _gptj_like(config: ConfigJson) -> GPTLike:
    config.refuse("tie_word_embeddings", False, "supported: a separate LM head, with a bias")
    hidden = config.integer("n_embd", "hidden_size")
    heads = Heads.of(config, hidden, read_num_heads(config, "n_head"))
    positions = config.integer("n_positions", "max_position_embeddings")
    rotary_dim = config.integer("rotary_dim", most=heads.head_size)
    if rotary_dim % 2:
        raise config.error("rotary_dim", "it must be even")
    return GPTLike(
        heads=heads,
        num_layers=read_num_layers(config, "n_layer"),
        inner_size=config.integer("n_inner", default=4 * hidden),
        activation=read_activation(config, "activation_function", PLAIN, "gelu_new"),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        positions=RopeSpec("default", 10000.0, rotary_dim, positions, is_neox=False),
        max_position=positions,
        embed=EmbedSpec("transformer.wte", config.integer("vocab_size"), hidden, hidden),
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        qkv_modules=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        o_module="attn.out_proj",
        mlp_modules=("mlp.fc_in", "mlp.fc_out"),
        norm_modules=("ln_1", None),
        final_norm="transformer.ln_f",
        masks=(r".*\.attn\.(bias|masked_bias)",),
        mlp_bias=True,
        head_bias=True,
        arrangement="parallel",
        tied=False,
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read GPT-J."""
    return _gptj_like(config).read(config)


def read_codegen(config: ConfigJson) -> ModelSpec:
    """Read CodeGen."""
    variant = _gptj_like(config)
    if variant.heads.num_heads % _SHARDS:
        raise config.error("n_head", f"it must be a multiple of {_SHARDS}")
    masks = (*variant.masks, r".*\.attn\.causal_mask")
    qkv = ("attn.qkv_proj",)
    variant = replace(variant, qkv_modules=qkv, qkv_layout="by_shard", qkv_shards=_SHARDS)
    return replace(variant, masks=masks).read(config)


ARCHITECTURES = {"GPTJForCausalLM": read, "CodeGenForCausalLM": read_codegen}
