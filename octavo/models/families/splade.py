"""SPLADE: encoders whose vectors have one number for each token of the vocabulary.

Formal et al., "SPLADE v2", arXiv:2109.10086: the maximum over the tokens of a text of
log(1 + relu(logit)), as sentence-transformers computes it. The architecture's name is vLLM's, for
`hf_overrides`: the checkpoints name BertForMaskedLM. A folder of sentence-transformers names the
module MLMTransformer instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import DenseActivation, DenseSpec, PoolerSpec, SentencesSpec
from octavo.models.families import bert, modernbert, rotary_bert
from octavo.models.families.base import Family
from octavo.models.families.classifiers import dense
from octavo.models.spec import ModelSpec

_ACTIVATIONS: dict[str, DenseActivation] = {"gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Head that predicts masked tokens. The defaults are BERT's."""

    dense: str = "cls.predictions.transform.dense"
    norm: str = "cls.predictions.transform.LayerNorm"
    decoder: str = "cls.predictions.decoder"
    embeddings: str = "bert.embeddings.word_embeddings"
    """Module whose weight a tied checkpoint stores for the decoder."""
    bias: str = "cls.predictions.bias"
    """Name of the decoder's bias in a tied checkpoint."""
    activation: str | None = "hidden_act"
    """Field of the activation; None: GELU."""
    eps: str | None = "layer_norm_eps"
    """Field of the norm's term; None: 1e-12."""
    bias_fields: tuple[str, str] | None = None
    """Fields that say whether the dense layer and the norm have a bias; None: both have one."""


_ROBERTA = _Head(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    embeddings="roberta.embeddings.word_embeddings",
    bias="lm_head.bias",
    activation=None,
)
_DISTIL = _Head(
    dense="vocab_transform",
    norm="vocab_layer_norm",
    decoder="vocab_projector",
    embeddings="distilbert.embeddings.word_embeddings",
    bias="vocab_projector.bias",
    activation="activation",
    eps=None,
)
_MODERN = _Head(
    dense="head.dense",
    norm="head.norm",
    decoder="decoder",
    embeddings="model.embeddings.tok_embeddings",
    bias="decoder.bias",
    activation="classifier_activation",
    eps="norm_eps",
    bias_fields=("classifier_bias", "norm_bias"),
)


def _read(config: ConfigJson, read: Family, head: _Head) -> ModelSpec:
    """Read an encoder that predicts masked tokens, as a sparse encoder."""
    spec = read(config)
    hidden, size = spec.hidden_size, spec.vocab_size
    biases = [config.flag(field, False) for field in head.bias_fields or ()] or [True, True]
    eps = 1e-12 if head.eps is None else config.number(head.eps)
    norm = LayerNormSpec(head.norm, hidden, eps, biases[1])
    activation: DenseActivation = "gelu"
    if head.activation is not None:
        activation = config.choice(head.activation, _ACTIVATIONS)
    layers = (
        dense(spec, head.dense, activation, bias=biases[0], norm=norm),
        DenseSpec(LinearSpec(((head.decoder, size),), hidden, bias=True), "log1p_relu"),
    )
    pooler = PoolerSpec("embed", ("max",), size, token_dense=layers, sparse=True)
    other_names = (
        (f"{head.decoder}.weight", f"{head.embeddings}.weight"),
        (f"{head.decoder}.bias", head.bias),
    )
    sentences = SentencesSpec(similarity_fn_name="dot")
    return replace(spec, poolers=(pooler,), prefixes=other_names, sentences=sentences)


def _reader(architecture: str, head: _Head) -> Family:
    read = (bert.ARCHITECTURES | modernbert.ARCHITECTURES | rotary_bert.ARCHITECTURES)[architecture]
    return partial(_read, read=read, head=head)


SPARSE: dict[str, Family] = {
    "BertForMaskedLM": _reader("BertForMaskedLM", _Head()),
    "RobertaForMaskedLM": _reader("RobertaForMaskedLM", _ROBERTA),
    "XLMRobertaForMaskedLM": _reader("XLMRobertaForMaskedLM", _ROBERTA),
    "CamembertForMaskedLM": _reader("CamembertForMaskedLM", _ROBERTA),
    "DistilBertForMaskedLM": _reader("DistilBertForMaskedLM", _DISTIL),
    "ModernBertForMaskedLM": _reader("ModernBertForMaskedLM", _MODERN),
}
"""Readers of sparse encoders, by the architectures in folders of sentence-transformers."""
ARCHITECTURES = {"BertSpladeSparseEmbeddingModel": SPARSE["BertForMaskedLM"]}
SPARSE |= ARCHITECTURES
