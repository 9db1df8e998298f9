"""DeBERTa V2 and V3: encoders with disentangled attention (He et al., arXiv:2006.03654)."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.disentangled import DisentangledSpec, Distances
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.families.bert import BertLike
from octavo.models.families.classifiers import families
from octavo.models.spec import ModelSpec

_PARTS = ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
_OTHERS = (
    r"(deberta\.)?embeddings\.position_embeddings\..*",
    r"(deberta\.)?encoder\.(rel_embeddings|LayerNorm)\..*",
    r"(lm|mask)_predictions\..*",
)
"""Names of tensors that checkpoints may have although the config does not use them."""


def read(config: ConfigJson) -> ModelSpec:
    """Read DeBERTa V2 without a head; V3 has the same architecture."""
    hidden = config.integer("hidden_size")
    size = hidden // config.integer("num_attention_heads")
    config.refuse("embedding_size", hidden, "only embeddings of the hidden size are supported")
    config.refuse("attention_head_size", size, "the heads must have the hidden size together")
    config.refuse("conv_kernel_size", 0, "the convolution after the first layer is not supported")
    config.refuse("pooler_hidden_size", hidden, "only a head of the hidden size is supported")
    config.refuse("pooler_hidden_act", "gelu", "only GELU is supported")
    spec = BertLike(prefix="deberta.", qkv_modules=_PARTS).read(config)
    if not config.flag("position_biased_input", True):
        spec = replace(spec, embed=replace(spec.embed, positions=None))
    kinds = _read_texts(config, "pos_att_type", ("c2p", "p2c"))
    (layer,) = spec.distinct_layers
    attention, feed_forward = layer.blocks
    assert isinstance(attention, AttentionSpec)
    products = None
    if kinds and config.flag("relative_attention", False):
        products = _read_products(config, kinds, attention)
    scale = 1 / math.sqrt(size * (1 + len(kinds)))
    attention = replace(attention, scale=scale, disentangled=products)
    layer = layer.with_blocks([attention, feed_forward])
    return replace(spec, layers=(layer,) * len(spec.layers), ignored=spec.ignored + _OTHERS)


def _read_products(
    config: ConfigJson, kinds: list[str], attention: AttentionSpec
) -> DisentangledSpec:
    longest = config.integer("max_relative_positions", default=-1, least=-1)
    if longest < 1:
        longest = config.integer("max_position_embeddings")
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
        "deberta.encoder.rel_embeddings",
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


ARCHITECTURES = families("DebertaV2", read, (("pooler.dense", "gelu"),))
