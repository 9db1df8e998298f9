"""Fields of encoders and of models with a head for classes, from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Protocol

import numpy as np

from octavo.checkpoints.gguf.header import Texts
from octavo.errors import ModelError

RANK = 4
"""Value of pooling_type for a model with a head."""
_YES_NO = ["yes", "no"]
"""Labels of a reranker that answers with one of two words (Qwen3)."""
_WITH_TYPES = ("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert")


class Described(Protocol):
    """Part of `Description` that this module needs."""

    @property
    def kind(self) -> object:
        """Architecture in GGUF."""

    @property
    def pooling_type(self) -> int:
        """Way of pooling; 0: the file names none."""

    def value(self, key: str) -> Any:
        """Return the value of a key of the architecture, or None."""

    def two_ropes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions of layers without and with a window."""

    def error(self, problem: str) -> ModelError:
        """Return an error that names the file."""


def encoder_fields(
    described: Described,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    in_layers: Set[str],
) -> dict[str, Any]:
    """Return the fields that only encoders have.

    Args:
        described: the metadata.
        config: the other fields.
        shapes: shapes of all tensors by their names, rows first.
        in_layers: names of the tensors of all layers, without the layers' prefixes.

    Raises:
        ModelError: a key has an unsupported value.
    """
    fields: dict[str, Any] = {}
    if described.kind in _WITH_TYPES:
        fields["type_vocab_size"] = shapes.get("token_types.weight", (0,))[0]
    if described.kind == "jina-bert-v2":  # old files have gate and up apart
        fields["split_gate"] = "ffn_gate.weight" in in_layers
    if described.kind == "modern-bert":
        fields |= _modern_bert(described, config, in_layers)
    return fields


def _modern_bert(
    described: Described, config: Mapping[str, Any], in_layers: Set[str]
) -> dict[str, Any]:
    """Return the fields of ModernBERT; each third layer, from the first one on, has no window."""
    pattern: Any = described.value("attention.sliding_window_pattern")
    window, activation = config.get("sliding_window"), described.value("hidden_activation")
    fields: dict[str, Any] = {
        "local_attention": window or 2,
        "norm_bias": "ffn_norm.bias" in in_layers,
        "hidden_activation": "gelu" if activation is None else activation,
        "rope_parameters": described.two_ropes(config),
    }
    if not window:
        fields["global_attn_every_n_layers"] = 1
    elif isinstance(pattern, np.ndarray):
        kinds = ["sliding_attention" if one else "full_attention" for one in pattern.tolist()]
        fields["layer_types"] = kinds
    else:
        fields["global_attn_every_n_layers"] = 3 if pattern is None else pattern
    return fields


def classifier_fields(
    described: Described, shapes: Mapping[str, tuple[int, ...]], *, causal: bool
) -> dict[str, Any]:
    """Return the fields of the head that scores classes; empty: the file has none.

    llama.cpp computes norm(activation(cls(x))), of the first token or of all tokens' mean, or of a
    decoder's last one, and then cls.output. Each of them may be missing.

    Args:
        described: the metadata.
        shapes: shapes of all tensors by their names, rows first.
        causal: True for a decoder.

    Raises:
        ModelError: the file says that it has a head, and has none, or the labels do not fit.
    """
    kind, labels = described.kind, described.value("classifier.output_labels")
    layers = [name for name in ("cls", "cls.output") if f"{name}.weight" in shapes]
    if not layers:
        if described.pooling_type == RANK:
            raise described.error(
                f"{kind}.pooling_type={RANK} (a model of scores) needs the tensor cls.weight or "
                "cls.output.weight, and the file has neither; convert the model again"
            )
        return {}
    size = (shapes[f"{layers[-1]}.weight"] or (0,))[0]
    if labels is None:
        labels = [f"LABEL_{i}" for i in range(size)]
    names = list(labels) if isinstance(labels, Texts | list) else []
    if len(names) != size:
        raise described.error(
            f"{kind}.classifier.output_labels must be {size} texts, the rows of {layers[-1]}.weight"
        )
    return {
        "id2label": dict(enumerate(names)),
        "stored_classifier": {
            "pooling": "last" if causal else "mean" if kind == "modern-bert" else "cls",
            "dense": "cls" in layers,
            "dense_bias": "cls.bias" in shapes,
            "dense_activation": "gelu" if kind == "modern-bert" else "tanh",
            "norm": "cls.norm.weight" in shapes,
            "output": "cls.output" in layers,
            "output_bias": "cls.output.bias" in shapes,
            # Of these, llama.cpp's score is the probability of "yes".
            "yes_no": causal and names == _YES_NO,
        },
    }
