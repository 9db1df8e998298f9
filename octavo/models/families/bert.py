"""BERT, and the encoders that differ from it in names and positions."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec, TokenTypesSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import DenseActivation, DenseSpec, FinalActivation, PoolerSpec
from octavo.models.families import base
from octavo.models.families.gpt import GPTLike
from octavo.models.spec import ModelSpec

_ACTIVATIONS = base.PLAIN | {"gelu_python": "gelu"}


def read_bert(config: ConfigJson, prefix: str, *, skipped: int = 0) -> ModelSpec:
    """Read the encoder of BERT, or of RoBERTa.

    Args:
        config: config.json.
        prefix: beginning of the names in checkpoints of a model with a head, e.g. "bert.".
        skipped: number of rows of the table of positions before that of position 0 (RoBERTa: 2).
    """
    config.refuse("is_decoder", False, "only BERT's encoder is supported")
    config.refuse("add_cross_attention", False, "only BERT's encoder is supported")
    config.refuse("position_embedding_type", "absolute", "only learned positions are supported")
    hidden, eps = config.integer("hidden_size"), config.number("layer_norm_eps", default=1e-12)
    rows = config.integer("max_position_embeddings", least=1 + skipped) - skipped
    embeddings = f"{prefix}embeddings."
    embed = EmbedSpec(
        f"{embeddings}word_embeddings",
        config.integer("vocab_size"),
        hidden,
        hidden,
        positions=PositionsSpec(f"{embeddings}position_embeddings", rows, skipped),
        token_types=TokenTypesSpec(
            f"{embeddings}token_type_embeddings", config.integer("type_vocab_size", default=2)
        ),
        norm=LayerNormSpec(f"{embeddings}LayerNorm", hidden, eps, bias=True),
    )
    attention = "attention.self"
    return GPTLike(
        heads=base.Heads.of(config, hidden, base.read_num_heads(config)),
        num_layers=base.read_num_layers(config),
        inner_size=config.integer("intermediate_size"),
        activation=base.read_activation(config, "hidden_act", _ACTIVATIONS, "gelu"),
        eps=eps,
        max_position=rows,
        embed=embed,
        layer_names=f"{prefix}encoder.layer.{{}}.",
        bare_prefix=prefix,
        qkv_modules=(f"{attention}.query", f"{attention}.key", f"{attention}.value"),
        o_module="attention.output.dense",
        mlp_modules=("intermediate.dense", "output.dense"),
        norm_modules=("attention.output.LayerNorm", "output.LayerNorm"),
        final_norm=None,
        masks=(r".*position_ids", rf"({prefix})?pooler\..*", r"cls\..*", r"lm_head\..*"),
        attention_bias=True,
        mlp_bias=True,
        arrangement="post",
        generates=False,
    ).read(config)


def classifier(
    config: ConfigJson,
    spec: ModelSpec,
    layers: tuple[tuple[str, DenseActivation], ...],
    head: str,
) -> ModelSpec:
    """Return a model with a head that scores classes from the first token.

    Args:
        config: config.json, with the classes' names.
        spec: the encoder.
        layers: modules before the head, from hidden size to hidden size, and their activations.
        head: module of the head.
    """
    hidden, labels = spec.hidden_size, read_labels(config)
    dense = [
        DenseSpec(LinearSpec(((m, hidden),), hidden, bias=True, exact=True), act)
        for m, act in layers
    ]
    dense.append(DenseSpec(LinearSpec(((head, len(labels)),), hidden, bias=True, exact=True)))
    pooler = PoolerSpec(
        "classify",
        ("cls",),
        len(labels),
        tuple(dense),
        final_activation(config, len(labels)),
        labels,
    )
    return replace(spec, poolers=(pooler,))


def token_classifier(config: ConfigJson, spec: ModelSpec, head: str = "classifier") -> ModelSpec:
    """Return a model with a head that scores classes of each token."""
    labels = read_labels(config)
    linear = LinearSpec(((head, len(labels)),), spec.hidden_size, bias=True, exact=True)
    pooler = PoolerSpec(
        "token_classify", ("all",), len(labels), (DenseSpec(linear),), "softmax", labels
    )
    return replace(spec, poolers=(pooler,))


def read_labels(config: ConfigJson) -> tuple[str, ...]:
    """Return the names of the classes."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(name) for _, name in sorted(names.items(), key=lambda it: int(it[0])))
    return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", default=2)))


def final_activation(config: ConfigJson, num_labels: int) -> FinalActivation:
    """Return the function that makes probabilities of scores, as in vLLM."""
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def read(config: ConfigJson) -> ModelSpec:
    """Read BERT without a head."""
    return read_bert(config, "bert.")


def read_sequence_classifier(config: ConfigJson) -> ModelSpec:
    """Read BERT with a head that scores classes."""
    spec = read_bert(config, "bert.")
    spec = replace(spec, ignored=tuple(name for name in spec.ignored if "pooler" not in name))
    return classifier(config, spec, (("bert.pooler.dense", "tanh"),), "classifier")


def read_token_classifier(config: ConfigJson) -> ModelSpec:
    """Read BERT with a head that scores classes of each token."""
    return token_classifier(config, read_bert(config, "bert."))


ARCHITECTURES = {
    "BertModel": read,
    "BertForMaskedLM": read,
    "BertForSequenceClassification": read_sequence_classifier,
    "BertForTokenClassification": read_token_classifier,
}
