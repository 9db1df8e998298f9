"""Mamba-2: every layer is a state space."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.families.base import model_spec, read_lm_head, read_num_layers
from octavo.models.families.llama import read_max_position
from octavo.models.families.state_parts import Mamba2Fields, read_dt_range, read_expanded
from octavo.models.spec import ModelSpec

_FIELDS = Mamba2Fields(
    num_heads="num_heads",
    head_size="head_dim",
    num_groups="n_groups",
    state_size="state_size",
    taps="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    out_bias="use_bias",
)


def mixers_spec(
    config: ConfigJson, mixers: list[BlockSpec], *, prefix: str, eps: float, tied: bool
) -> ModelSpec:
    """Return a model whose layers have one block each.

    Args:
        config: config.json.
        mixers: block of each layer; equal blocks are the same object.
        prefix: prefix of the names of the weights.
        eps: term of the norms.
        tied: default for a config without tie_word_embeddings.
    """
    hidden = config.integer("hidden_size")
    norm = RMSNormSpec("norm", hidden, eps)
    layers = {id(mixer): LayerSpec((Sublayer("mixer", mixer, norm),)) for mixer in mixers}
    embed = EmbedSpec(f"{prefix}embeddings", config.integer("vocab_size"), hidden, hidden)
    lm_head = read_lm_head(config, embed, tied=tied)
    spec = model_spec(
        config,
        embed=embed,
        layers=[layers[id(mixer)] for mixer in mixers],
        head=HeadSpec(RMSNormSpec(f"{prefix}norm_f", hidden, eps), lm_head),
        max_model_len=read_max_position(config),
        layer_names=prefix + "layers.{}.",
        bare_prefix=prefix,
    )
    return replace(spec, prefixes=((f"{prefix}embeddings.", f"{prefix}embedding."),))


def read(config: ConfigJson) -> ModelSpec:
    """Read Mamba-2."""
    eps = config.number("layer_norm_epsilon", default=1e-5)
    mixer = _FIELDS.read(
        config,
        "mixer",
        inner_size=read_expanded(config, "expand"),
        eps=eps,
        dt_range=read_dt_range(config),
    )
    mixers: list[BlockSpec] = [mixer] * read_num_layers(config)
    return mixers_spec(config, mixers, prefix="backbone.", eps=eps, tied=False)


ARCHITECTURES = {"Mamba2ForCausalLM": read}
