"""Pooling models that are made of a family of decoders: vectors, classes, scores and rewards.

Names are those of transformers (`LlamaForSequenceClassification`, `Qwen3Model` ...) and vLLM
(`Qwen2ForRewardModel`, `Qwen2ForProcessRewardModel`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.attention import Alibi, AttentionSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.pooler import DenseSpec, PoolerSpec, Pooling
from octavo.models.families.base import Family
from octavo.models.families.classifiers import final_activation, read_labels
from octavo.models.spec import ModelSpec
from octavo.models.vocabulary import read_vocabulary

Kind: TypeAlias = Literal[
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
    "Model",
]
_KINDS: tuple[Kind, ...] = ("ForSequenceClassification", "ForTokenClassification")
_KINDS += ("ForProcessRewardModel", "ForRewardModel", "Model")
_BIDIRECTIONAL = "Bidirectional"
_POOLING: dict[str, Pooling] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_POOLING |= {"weighted_avg": "weighted_mean"}
"""Values of the field `pooling` of bidirectional Llamas."""
_REWARD_HEADS = {"InternLM2ForRewardModel": "v_head"}
"""Modules of reward heads with one layer; others have two, score.0 and score.2."""


@dataclass(frozen=True)
class Variant:
    """Pooling model of a family of decoders."""

    base: str
    """Architecture of the family."""
    kind: Kind
    bidirectional: bool = False
    """True if the name says that a token sees all tokens of its text."""


def find_variant(architecture: str, families: Collection[str]) -> Variant | None:
    """Return the variant that an architecture names, such as Qwen3ForSequenceClassification.

    Args:
        architecture: a name in config.json's `architectures`.
        families: architectures of the families of decoders.
    """
    for kind in _KINDS:
        stem = architecture.removesuffix(kind)
        if stem == architecture:
            continue
        whole = stem.removesuffix(_BIDIRECTIONAL)
        for name in (whole, whole.removesuffix("Text")):
            for end in ("ForCausalLM", "LMHeadModel"):
                if f"{name}{end}" in families:
                    return Variant(f"{name}{end}", kind, stem != whole)
    return None


def read_variant(
    variant: Variant, read: Family, config: ConfigJson, checkpoint: Checkpoint
) -> ModelSpec:
    """Return the model of a variant, without an LM head.

    Args:
        variant: the variant.
        read: reader of the family's decoders.
        config: config.json.
        checkpoint: the other files; a head of tokens' rows needs the tokenizer.

    Raises:
        ModelError: a field has an unsupported value.
    """
    decoder = read(config)
    spec, pooling = without_lm_head(decoder), _read_pooling(variant, config)
    if variant.kind == "Model":
        return replace(spec, poolers=(_vectors(spec, pooling),))
    if variant.kind == "ForSequenceClassification":
        if config.has("classifier_from_token"):
            return replace(decoder, poolers=(_token_pooler(decoder, config, checkpoint),))
        config.refuse("temperature", 1.0, "scores are not divided by a temperature")
        labels = read_labels(config)
        head = LinearSpec((("score", len(labels)),), spec.hidden_size, exact=True)
        activation = final_activation(config, len(labels))
        layers = (DenseSpec(head),)
        pooler = PoolerSpec("classify", (pooling,), len(labels), layers, activation, labels)
    elif variant.kind == "ForTokenClassification":
        labels = read_labels(config)
        bias = config.flag("token_classification_bias", True)
        head = LinearSpec((("score", len(labels)),), spec.hidden_size, bias, exact=True)
        layers = (DenseSpec(head),)
        pooler = PoolerSpec("token_classify", ("all",), len(labels), layers, "softmax", labels)
    else:
        pooler = _reward_pooler(variant, spec, config)
    return replace(spec, poolers=(pooler,))


def without_lm_head(spec: ModelSpec) -> ModelSpec:
    """Return the model without its LM head, which its checkpoint may have."""
    lm_head = spec.head.lm_head
    if lm_head is None:
        return spec
    unused = () if spec.tied else tuple(rf"{re.escape(m)}\..*" for m, _ in lm_head.modules)
    return replace(spec, head=replace(spec.head, lm_head=None), ignored=(*spec.ignored, *unused))


def see_all(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the model in which a token sees all tokens of its text; it generates nothing.

    transformers counts the window without the token itself, except where the family has read it
    for use_bidirectional_attention.

    Raises:
        ModelError: a layer can only be computed from left to right.
    """
    more = 0 if config.get("use_bidirectional_attention") is True else 1
    made: dict[int, LayerSpec] = {}
    for layer in spec.distinct_layers:
        blocks = []
        for block in layer.blocks:
            if isinstance(block, AttentionSpec):
                parts = block.chunk_size, block.sinks, block.source
                if parts != (None, None, None) or isinstance(block.positions, Alibi):
                    raise _not_causal(spec)
                window = block.sliding_window
                window = None if window is None else window + more
                block = replace(block, causal=False, sliding_window=window)
            elif block.caches():
                raise _not_causal(spec)
            blocks.append(block)
        made[id(layer)] = layer.with_blocks(blocks)
    layers = tuple(made[id(layer)] for layer in spec.layers)
    poolers = spec.poolers or (_vectors(spec, "last"),)
    return without_lm_head(replace(spec, layers=layers, poolers=poolers))


def _vectors(spec: ModelSpec, pooling: Pooling) -> PoolerSpec:
    return PoolerSpec("embed", (pooling,), spec.hidden_size, activation="normalize")


def _not_causal(spec: ModelSpec) -> ModelError:
    return ModelError(
        f"{spec.architecture} has layers that Octavo computes from left to right only, and "
        "config.json asks for attention to all tokens (is_causal or use_bidirectional_attention); "
        "choose another model."
    )


def _read_pooling(variant: Variant, config: ConfigJson) -> Pooling:
    """Return the way of pooling: the last token, or that of a bidirectional model."""
    if not variant.bidirectional:
        return "last"
    return config.choice("pooling", _POOLING, "avg")


def _reward_pooler(variant: Variant, spec: ModelSpec, config: ConfigJson) -> PoolerSpec:
    """Return the pooler of a reward for each token, or of scores of each step's end."""
    hidden, steps = spec.hidden_size, variant.kind == "ForProcessRewardModel"
    size = config.integer("num_labels", default=2) if steps else 1
    if steps and config.has("id2label"):
        size = len(read_labels(config))
    module = _REWARD_HEADS.get(spec.architecture)
    if module is not None:
        layers = [DenseSpec(LinearSpec(((module, size),), hidden, exact=True))]
    else:
        inner = LinearSpec((("score.0", hidden),), hidden, bias=True, exact=True)
        last = LinearSpec((("score.2", size),), hidden, bias=True, exact=True)
        layers = [DenseSpec(inner, "relu"), DenseSpec(last)]
    activation: Literal["softmax", "none"] = "softmax" if steps else "none"
    return PoolerSpec("token_classify", ("all",), size, tuple(layers), activation)


def _token_pooler(decoder: ModelSpec, config: ConfigJson, checkpoint: Checkpoint) -> PoolerSpec:
    """Return the pooler of a reranker that is a decoder: its scores are logits of tokens.

    The fields are vLLM's: classifier_from_token names tokens; method from_2_way_softmax
    (is_original_qwen3_reranker) subtracts the first token's logit from the second one's, and
    no_post_processing returns each token's logit.
    """
    tokens, lm_head = config.get("classifier_from_token"), decoder.head.lm_head
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise config.error("classifier_from_token", 'it must be a list of tokens, ["no", "yes"]')
    methods: dict[str, Literal["margin", "none"]]
    methods = {"from_2_way_softmax": "margin", "no_post_processing": "none"}
    default = "from_2_way_softmax" if config.flag("is_original_qwen3_reranker", False) else None
    method = config.choice("method", methods, default)
    if not tokens or (method == "margin" and len(tokens) != 2):
        raise config.error("classifier_from_token", "this method needs two tokens")
    assert lm_head is not None
    ids = [_token_id(token, decoder, config, checkpoint) for token in tokens]
    rows = replace(lm_head, exact=True, bias=False).split(*((i, i + 1) for i in ids))
    size = 1 if method == "margin" else len(ids)
    labels = tuple(f"LABEL_{i}" for i in range(size))
    activation = final_activation(config, size)
    return PoolerSpec("classify", ("last",), size, (DenseSpec(rows, method),), activation, labels)


def _token_id(token: str, decoder: ModelSpec, config: ConfigJson, checkpoint: Checkpoint) -> int:
    """Return the id of a token of the vocabulary, as the tokenizer's file spells it."""
    vocabulary = read_vocabulary(checkpoint)
    if vocabulary is None:
        raise config.error(
            "classifier_from_token", f"{checkpoint.path} has no tokenizer.json to find them in"
        )
    found = vocabulary.get(token)
    if not isinstance(found, int) or not 0 <= found < decoder.vocab_size:
        raise config.error("classifier_from_token", f"the vocabulary has no token {token!r}")
    return found
