"""GPT-2 and GPT-BigCode: learned positions; GPT-2's weights are stored as Conv1D."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.families import base
from octavo.models.families.gpt import GPTLike
from octavo.models.spec import ModelSpec


def _gpt2_like(config: ConfigJson, activation: str = "gelu_new") -> GPTLike:
    config.refuse("add_cross_attention", False, "cross attention is not supported")
    hidden = config.integer("n_embd", "hidden_size")
    heads = base.Heads.of(config, hidden, base.read_num_heads(config, "n_head"))
    num_layers = base.read_num_layers(config, "n_layer")
    positions = config.integer("n_positions", "max_position_embeddings")
    learned = PositionsSpec("transformer.wpe", positions)
    vocab_size = config.integer("vocab_size")
    scale = heads.scale if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    return GPTLike(
        heads=heads,
        num_layers=num_layers,
        inner_size=config.integer("n_inner", default=4 * hidden),
        activation=base.read_activation(config, "activation_function", base.PLAIN, activation),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        max_position=positions,
        embed=EmbedSpec("transformer.wte", vocab_size, hidden, hidden, positions=learned),
        layer_names="transformer.h.{}.",
        bare_prefix="transformer.",
        qkv_modules=("attn.c_attn",),
        o_module="attn.c_proj",
        mlp_modules=("mlp.c_fc", "mlp.c_proj"),
        norm_modules=("ln_1", "ln_2"),
        final_norm="transformer.ln_f",
        masks=(r".*\.attn\.(bias|masked_bias)",),
        qkv_layout="conv1d",
        layout="conv1d",
        attention_bias=True,
        mlp_bias=True,
        scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(num_layers)),
        tied=True,
    )


def read(config: ConfigJson) -> ModelSpec:
    """Read GPT-2."""
    return _gpt2_like(config).read(config)


def read_bigcode(config: ConfigJson) -> ModelSpec:
    """Read GPT-BigCode (SantaCoder, StarCoder): one head of keys and values for all queries."""
    config.refuse("scale_attn_by_inverse_layer_idx", False, "GPT-BigCode has no such scale")
    variant = replace(_gpt2_like(config, "gelu_pytorch_tanh"), layout="rows")
    if not config.flag("multi_query", True):
        return replace(variant, qkv_layout="by_group").read(config)
    heads = replace(variant.heads, num_kv_heads=1)
    return replace(variant, heads=heads, qkv_layout="rows").read(config)


ARCHITECTURES = {"GPT2LMHeadModel": read, "GPTBigCodeForCausalLM": read_bigcode}
