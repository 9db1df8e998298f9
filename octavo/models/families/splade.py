"""SPLADE: BERT as a sparse encoder, whose vectors have one number for each token of the vocabulary.

Formal et al., "SPLADE v2", arXiv:2109.10086: the maximum over the tokens of a text of
log(1 + relu(logit)), as sentence-transformers computes it. The architecture's name is vLLM's, for
`hf_overrides`: the checkpoints name BertForMaskedLM.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import DenseActivation, DenseSpec, PoolerSpec
from octavo.models.families.bert import BertLike
from octavo.models.families.classifiers import dense
from octavo.models.spec import ModelSpec

_ACTIVATIONS: dict[str, DenseActivation] = {"gelu": "gelu", "relu": "relu"}
_OTHER_NAMES = (
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
"""Names of the last layer's tensors, and those of tied checkpoints."""


def read(config: ConfigJson) -> ModelSpec:
    """Read a BERT that predicts masked tokens, as a sparse encoder."""
    spec = BertLike().read(config)
    head, hidden, size = "cls.predictions", spec.hidden_size, spec.vocab_size
    norm = LayerNormSpec(f"{head}.transform.LayerNorm", hidden, config.number("layer_norm_eps"))
    activation = config.choice("hidden_act", _ACTIVATIONS)
    layers = (
        dense(spec, f"{head}.transform.dense", activation, norm=norm),
        DenseSpec(LinearSpec(((f"{head}.decoder", size),), hidden, bias=True), "log1p_relu"),
    )
    pooler = PoolerSpec("embed", ("max",), size, token_dense=layers, sparse=True)
    return replace(spec, poolers=(pooler,), prefixes=_OTHER_NAMES)


ARCHITECTURES = {"BertSpladeSparseEmbeddingModel": read}
