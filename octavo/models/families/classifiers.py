"""Heads of encoders that score classes."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec, NormSpec
from octavo.models.blocks.pooler import (
    DenseActivation,
    DenseSpec,
    FinalActivation,
    PoolerSpec,
    Pooling,
)
from octavo.models.families.base import Family
from octavo.models.spec import ModelSpec

_EPS = 1e-12  # of BERT
_POOLING: tuple[Pooling, ...] = ("cls", "last", "mean")
_DENSE: dict[str, DenseActivation] = {"tanh": "tanh", "gelu": "gelu"}
Layer = tuple[str, DenseActivation]
"""Module from hidden size to hidden size, and its activation."""
_ACTIVATIONS: dict[str, FinalActivation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
"""Last functions of rerankers by their names in sentence-transformers."""


def dense(
    spec: ModelSpec,
    module: str,
    activation: DenseActivation,
    *,
    bias: bool = True,
    norm: NormSpec | None = None,
) -> DenseSpec:
    """Return a layer of a head, from hidden size to hidden size."""
    linear = LinearSpec(((module, spec.hidden_size),), spec.hidden_size, bias, exact=True)
    return DenseSpec(linear, activation, norm)


def classifier(
    config: ConfigJson,
    spec: ModelSpec,
    layers: tuple[DenseSpec, ...],
    head: str = "classifier",
    *,
    pooling: Pooling = "cls",
    of_tokens: int = 0,
) -> ModelSpec:
    """Return a model with a head that scores classes of texts.

    Args:
        config: config.json, with the classes' names.
        spec: the encoder.
        layers: layers before the last one.
        head: module of the last layer.
        pooling: way from the hidden states of all tokens to one vector.
        of_tokens: number of the layers that compute each token, before the pooling.
    """
    labels = read_labels(config)
    last = LinearSpec(((head, len(labels)),), spec.hidden_size, bias=True, exact=True)
    layers += (DenseSpec(last),)
    pooler = PoolerSpec(
        "classify",
        (pooling,),
        len(labels),
        layers[of_tokens:],
        final_activation(config, len(labels)),
        labels,
        token_dense=layers[:of_tokens],
    )
    return replace(spec, poolers=(pooler,))


def token_classifier(
    config: ConfigJson,
    spec: ModelSpec,
    layers: tuple[DenseSpec, ...] = (),
) -> ModelSpec:
    """Return a model with a head that scores classes of each token."""
    labels = read_labels(config)
    size = spec.hidden_size
    linear = LinearSpec((("classifier", len(labels)),), size, bias=True, exact=True)
    pooler = PoolerSpec(
        "token_classify", ("all",), len(labels), (*layers, DenseSpec(linear)), "softmax", labels
    )
    return replace(spec, poolers=(pooler,))


def stored_classifier(config: ConfigJson, spec: ModelSpec) -> ModelSpec:
    """Return a model with the head that a GGUF file stores, as `stored_classifier` describes it.

    Args:
        config: config.json, with the classes' names.
        spec: the encoder or decoder.
    """
    head, labels = config.section("stored_classifier"), read_labels(config)
    hidden, eps = spec.hidden_size, config.number("layer_norm_eps", default=_EPS)
    pooling = head.choice("pooling", {name: name for name in _POOLING})
    layers, size = [], len(labels)
    if head.flag("dense", False):
        rows = hidden if head.flag("output", False) else size
        linear = LinearSpec((("cls", rows),), hidden, head.flag("dense_bias", False), exact=True)
        norm = LayerNormSpec("cls.norm", rows, eps, bias=False)
        activation = head.choice("dense_activation", _DENSE)
        layers.append(DenseSpec(linear, activation, norm if head.flag("norm", False) else None))
    if head.flag("output", False):
        bias = head.flag("output_bias", False)
        linear = LinearSpec((("cls.output", size),), hidden, bias, exact=True)
        layers.append(DenseSpec(linear))
    if head.flag("yes_no", False):  # the sigmoid of the margin is the probability of "yes"
        linear = linear.split((1, 2), (0, 1))
        layers[-1], labels = DenseSpec(linear, "margin"), ("yes",)
    pooler = PoolerSpec(
        "classify",
        (pooling,),
        len(labels),
        tuple(layers),
        final_activation(config, len(labels)),
        labels,
    )
    return replace(spec, poolers=(pooler,))


def families(
    name: str, read: Family, layers: tuple[Layer, ...], head: str = "classifier"
) -> dict[str, Family]:
    """Return the architectures of an encoder: without a head, and with a head of each kind.

    Args:
        name: beginning of the names.
        read: reader of the encoder.
        layers: layers of the head that scores classes, between the first token and the last layer.
        head: module of the last layer.
    """

    def classify(config: ConfigJson) -> ModelSpec:
        spec = read(config)
        return classifier(config, spec, tuple(dense(spec, *layer) for layer in layers), head)

    return {
        f"{name}Model": read,
        f"{name}ForMaskedLM": read,
        f"{name}ForSequenceClassification": classify,
        f"{name}ForTokenClassification": lambda config: token_classifier(config, read(config)),
    }


def read_labels(config: ConfigJson) -> tuple[str, ...]:
    """Return the names of the classes."""
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", default=2)))
    if not isinstance(names, dict) or not names or any(not str(i).isdecimal() for i in names):
        raise config.error("id2label", "it must map the numbers of the classes to their names")
    return tuple(str(name) for _, name in sorted(names.items(), key=lambda it: int(it[0])))


def final_activation(config: ConfigJson, num_labels: int) -> FinalActivation:
    """Return the function that makes probabilities of scores, as in vLLM."""
    options = config.section("sentence_transformers")
    if options.has("activation_fn"):
        return options.choice("activation_fn", _ACTIVATIONS)
    if config.has("sbert_ce_default_activation_function"):
        return config.choice("sbert_ce_default_activation_function", _ACTIVATIONS)
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
