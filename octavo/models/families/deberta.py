"""DeBERTa V1, V2 and V3: encoders with disentangled attention (He et al., arXiv:2006.03654)."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.disentangled import DisentangledSpec, Distances
from octavo.models.blocks.layer import Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.text_conv import TextConvSpec
from octavo.models.families import base
from octavo.models.families.bert import BertLike
from octavo.models.families.classifiers import Layer, families
from octavo.models.spec import ModelSpec

_FUSED = ("attention.self.in_proj",)
_PARTS = ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
_TABLE = "deberta.encoder.rel_embeddings"
"""Module of the vectors of distances."""
_OTHERS = (
    r"(deberta\.)?embeddings\.position_embeddings\..*",
    r"(deberta\.)?encoder\.(rel_embeddings|LayerNorm)\..*",
    r"(lm|mask)_predictions\..*",
)
"""Names of tensors that checkpoints may have although the config does not use them."""


def read(config: ConfigJson) -> ModelSpec:
    """Read DeBERTa V2 without a head; V3 has the same architecture."""
    size = config.integer("hidden_size") // config.integer("num_attention_heads")
    config.refuse("attention_head_size", size, "the heads must have the hidden size together")
    spec = _read(config, _PARTS)
    taps = config.integer("conv_kernel_size", default=0, least=0)
    return _with_convolution(config, spec, taps) if taps else spec


def read_first(config: ConfigJson) -> ModelSpec:
    """Read DeBERTa V1 without a head."""
    config.refuse("talking_head", False, "only heads that do not mix are supported")
    return _read(config, _FUSED)


def _read(config: ConfigJson, qkv_modules: tuple[str, ...]) -> ModelSpec:
    hidden = config.integer("hidden_size")
    config.refuse("embedding_size", hidden, "only embeddings of the hidden size are supported")
    config.refuse("pooler_hidden_size", hidden, "only a head of the hidden size is supported")
    config.refuse("pooler_hidden_act", "gelu", "only GELU is supported")
    spec = BertLike(prefix="deberta.", qkv_modules=qkv_modules).read(config)
    if not config.flag("position_biased_input", True):
        spec = replace(spec, embed=replace(spec.embed, positions=None))
    kinds = _read_texts(config, "pos_att_type", ("c2p", "p2c"))
    (layer,) = spec.distinct_layers
    attention, feed_forward = layer.blocks
    assert isinstance(attention, AttentionSpec)
    qkv_proj, products = attention.qkv_proj, None
    if kinds and config.flag("relative_attention", False):
        read_products = _read_first_products if qkv_modules == _FUSED else _read_products
        products = read_products(config, kinds, attention)
    if qkv_modules == _FUSED:
        biases = "attention.self.q_bias", "attention.self.v_bias"
        qkv_proj = replace(qkv_proj, layout="by_group", groups=attention.num_heads, biases=biases)
    scale = 1 / math.sqrt(attention.head_size * (1 + len(kinds)))
    attention = replace(attention, qkv_proj=qkv_proj, scale=scale, disentangled=products)
    layer = layer.with_blocks([attention, feed_forward])
    return replace(spec, layers=(layer,) * len(spec.layers), ignored=spec.ignored + _OTHERS)


def _with_convolution(config: ConfigJson, spec: ModelSpec, taps: int) -> ModelSpec:
    """Return the encoder with the convolution of its first layer's input (V2 xlarge)."""
    if taps % 2 == 0:
        raise config.error("conv_kernel_size", "it must be odd")
    config.refuse("conv_groups", 1, "only a convolution of all channels is supported")
    hidden, activation = spec.hidden_size, config.choice("conv_act", base.PLAIN)
    proj = LinearSpec(
        (("conv.conv", hidden),), taps * hidden, True, layout="taps", groups=taps, exact=True
    )
    norm = LayerNormSpec("conv.LayerNorm", hidden, config.number("layer_norm_eps"))
    block = TextConvSpec(proj, taps, activation)
    first = spec.layers[0]
    conv = Sublayer("conv", block, norm, reads_input=True)
    first = replace(first, sublayers=(*first.sublayers, conv))
    own = spec.layer_names.format(0) + "conv."
    stored = [f"{prefix}encoder.conv." for prefix in (spec.bare_prefix, "")]
    return replace(
        spec,
        layers=(first, *spec.layers[1:]),
        prefixes=tuple((own, prefix) for prefix in stored),
    )


def _longest(config: ConfigJson) -> int:
    """Return the distance from which on all distances have the same vector."""
    longest = config.integer("max_relative_positions", default=-1, least=-1)
    return longest if longest > 0 else config.integer("max_position_embeddings")


def _read_first_products(
    config: ConfigJson, kinds: list[str], attention: AttentionSpec
) -> DisentangledSpec:
    """Return the products of V1: its table has a row for each distance, and no norm."""
    hidden = attention.qkv_proj.inputs
    keys, queries = (
        LinearSpec(((f"attention.self.{name}", hidden),), hidden, bias) if kind in kinds else None
        for kind, name, bias in (("c2p", "pos_proj", False), ("p2c", "pos_q_proj", True))
    )
    distances = Distances(_longest(config))
    return DisentangledSpec(_TABLE, None, distances, keys, queries, attention.head_size)


def _read_products(
    config: ConfigJson, kinds: list[str], attention: AttentionSpec
) -> DisentangledSpec:
    longest = _longest(config)
    buckets = config.integer("position_buckets", default=-1, least=-1)
    if buckets > 0 and (buckets % 2 or buckets // 2 >= longest - 1):
        raise config.error("position_buckets", f"it must be even, and less than {2 * longest - 2}")
    hidden = attention.qkv_proj.inputs
    norm = None
    if "layer_norm" in _read_texts(config, "norm_rel_ebd", ("none", "layer_norm")):
        eps = config.number("layer_norm_eps")
        norm = LayerNormSpec("deberta.encoder.LayerNorm", hidden, eps)
    shared = config.flag("share_att_key", False)
    part = "" if shared else "pos_"
    keys, queries = (
        LinearSpec(((f"attention.self.{part}{name}_proj", hidden),), hidden, bias=True)
        if kind in kinds
        else None
        for kind, name in (("c2p", "key"), ("p2c", "query"))
    )
    return DisentangledSpec(
        _TABLE,
        norm,
        Distances(longest, buckets if buckets > 0 else None),
        keys,
        queries,
        attention.head_size,
    )


def _read_texts(config: ConfigJson, name: str, known: tuple[str, ...]) -> list[str]:
    """Return the texts of a field: a list, or one text with | between them."""
    value = config.get(name) or []
    texts = [text.strip() for text in value.lower().split("|")] if isinstance(value, str) else value
    if not isinstance(texts, list) or any(text not in known for text in texts):
        raise config.error(name, f"supported: {', '.join(known)}")
    return list(dict.fromkeys(texts))


_HEAD: tuple[Layer, ...] = (("pooler.dense", "gelu"),)
ARCHITECTURES = families("DebertaV2", read, _HEAD) | families("Deberta", read_first, _HEAD)
