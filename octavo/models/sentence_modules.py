"""Files of a sentence-transformers folder: how a model's hidden states become vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.tasks import read_tasks
from octavo.errors import ModelError
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import (
    DenseActivation,
    DenseSpec,
    Pooling,
    SentencesSpec,
    Similarity,
    SparseActivation,
)

_OWN: tuple[str, ...] = ("sentence_transformers.models.", "sentence_transformers.base.modules.")
_OWN += ("sentence_transformers.sentence_transformer.modules.", "pylate.models.")
_OWN += ("sentence_transformers.sparse_encoder.models.",)
_OWN += ("sentence_transformers.sparse_encoder.modules.",)
"""Beginnings of the names of the own modules of sentence-transformers, old and new, and PyLate."""
_TASKS = "custom_st.Transformer"
"""Module of models with adapters of tasks; it passes the task to the model."""
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Fields of a Pooling module's config, in the order in which their vectors are joined."""
_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""Values of the field pooling_mode of newer configs."""
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
"""Classes of torch.nn that a Dense module may name."""
_OTHERS = {
    "Router": "different modules for queries and for documents",
    "Asym": "different modules for queries and for documents",
    "SparseStaticEmbedding": "a fixed weight of each token",
    "SparseAutoEncoder": "a sparse vector from a dense one",
    "StaticEmbedding": "a fixed vector of each token",
    "WordEmbeddings": "a fixed vector of each token",
}
"""Modules that Octavo does not have, and what they do."""
_SPARSE_ACTIVATIONS: dict[str, SparseActivation] = {
    "relu": "log1p_relu",
    "log1p_relu": "log1p_log1p_relu",
}
"""Values of the field activation_function of SpladePooling; a logarithm comes after them."""
_LAYER_NORM_EPS = 1e-5  # of torch.nn.LayerNorm
_AGAIN = "download the folder again"


@dataclass(frozen=True)
class SparsePooling:
    """Module SpladePooling: from the logits of all tokens to the weights of a text."""

    pooling: Pooling
    activation: SparseActivation


@dataclass(frozen=True)
class SentenceModules:
    """Modules of a folder after the transformer itself."""

    pooling: tuple[Pooling, ...]
    """Empty: the folder names no Pooling module."""
    dense: tuple[DenseSpec, ...]
    size: int
    """Number of numbers of a vector."""
    normalizes: bool
    tokens: tuple[DenseSpec, ...] = ()
    """Layers of each token, of a folder without a Pooling module (PyLate)."""
    sparse: SparsePooling | None = None
    """Pooling of a sparse encoder; the other fields then do not matter."""


def read_modules(checkpoint: Checkpoint, hidden_size: int) -> SentenceModules | None:
    """Return what modules.json names; None: the checkpoint has no such file.

    Args:
        checkpoint: the checkpoint.
        hidden_size: size of the model's hidden states.

    Raises:
        ModelError: a file is damaged, or names a module that Octavo does not have.
    """
    modules = _read_json(checkpoint, "modules.json")
    if modules is None:
        return None
    where = checkpoint.path / "modules.json"
    if not isinstance(modules, list) or not all(isinstance(it, dict) for it in modules):
        raise ModelError(f"{where} is damaged: it must be a list of modules; download it again.")
    pooling: tuple[Pooling, ...] = ()
    dense: list[DenseSpec] = []
    size, normalizes = hidden_size, False
    for module in modules:
        full, path = str(module.get("type")), str(module.get("path", ""))
        name = full.rpartition(".")[2]
        if full == _TASKS and read_tasks(checkpoint.config):
            continue
        if not full.startswith(_OWN):
            raise ModelError(
                f"{where} names the module {full!r}, which is code of the model; Octavo never runs "
                "such code. Use a model with sentence-transformers' own modules."
            )
        if name in _OTHERS:
            raise ModelError(
                f"{where} names the module {name} ({_OTHERS[name]}), which Octavo does not have; "
                "use a model without it."
            )
        if name == "SpladePooling":
            return SentenceModules((), (), size, False, sparse=_read_splade(checkpoint, path))
        if name in ("Transformer", "MLMTransformer"):
            continue
        if name == "Pooling" and not (pooling or dense):
            pooling = _read_pooling(checkpoint, path, hidden_size)
            size *= len(pooling)
        elif name == "Normalize" and (pooling or dense):
            normalizes = True
        elif name in ("Dense", "LayerNorm") and not normalizes:
            layer, size = (_read_dense if name == "Dense" else _read_norm)(checkpoint, path, size)
            dense.append(layer)
        else:
            raise ModelError(
                f"{where} names the module {name} at a place where Octavo does not have it; it has "
                "Transformer, then Pooling except for vectors of tokens, then Dense and LayerNorm, "
                "then Normalize."
            )
    if not pooling:
        return SentenceModules((), (), size, normalizes, tuple(dense))
    return SentenceModules(pooling, tuple(dense), size, normalizes)


def read_sentences(
    checkpoint: Checkpoint, similarity: Similarity = "cosine"
) -> tuple[SentencesSpec, int | None]:
    """Return config_sentence_transformers.json: the use of vectors, and truncate_dim if it is set.

    The prompts of tasks with adapters are those of config.json.

    Args:
        checkpoint: the checkpoint.
        similarity: similarity of a file that names none; MaxSim, whatever the file names.

    Raises:
        ModelError: the file is damaged.
    """
    config = _read_config(checkpoint, "config_sentence_transformers.json", required=False)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(it, str) for it in prompts.values()):
        raise config.error("prompts", "it must be an object of texts")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise config.error("default_prompt_name", f"prompts has {', '.join(prompts) or 'none'}")
    known: dict[str, Similarity] = {name: name for name in get_args(Similarity)}
    del known["max_sim"]
    known |= {"dot_product": "dot"}
    if similarity != "max_sim":
        similarity = config.choice("similarity_fn_name", known, similarity)
    cut = config.integer("truncate_dim") if config.has("truncate_dim") else None
    tasks = read_tasks(checkpoint.config)
    if tasks:
        instructions = checkpoint.config.section("task_instructions")
        prompts = {**prompts, **{task: str(instructions.get(task) or "") for task in tasks}}
    return SentencesSpec(tuple(prompts.items()), default, tasks, similarity), cut


def read_max_len(checkpoint: Checkpoint, most: int) -> int:
    """Return the longest text of a sentence-transformers folder, in tokens."""
    config = _read_config(checkpoint, "sentence_bert_config.json", required=False)
    return min(config.integer("max_seq_length", default=most), most)


def _read_pooling(checkpoint: Checkpoint, path: str, hidden_size: int) -> tuple[Pooling, ...]:
    """Return the ways of pooling of a Pooling module in a folder of the checkpoint."""
    config = _read_config(checkpoint, f"{path}/config.json")
    for name in ("word_embedding_dimension", "embedding_dimension"):
        config.refuse(name, hidden_size, f"the model's hidden states have {hidden_size} numbers")
    config.refuse("include_prompt", True, "the tokens of prompts are always part of the vector")
    modes = config.get("pooling_mode")
    if modes is not None:
        names = [modes] if isinstance(modes, str) else modes
        if not isinstance(names, list) or not names or any(n not in _NAMES for n in names):
            raise config.error("pooling_mode", f"supported: {', '.join(_NAMES)}")
        found = tuple(mode for n, mode in _NAMES.items() if n in names)
    else:
        found = tuple(mode for field, mode in _MODES.items() if config.flag(field, False))
    if not found:
        raise ModelError(f"{config.where} names no way of pooling; {_AGAIN}.")
    return found


def is_sparse(checkpoint: Checkpoint) -> bool:
    """Return True if modules.json describes a sparse encoder."""
    modules = _read_json(checkpoint, "modules.json")
    listed = modules if isinstance(modules, list) else []
    return any(
        isinstance(it, dict) and str(it.get("type")).endswith(".SpladePooling") for it in listed
    )


def _read_splade(checkpoint: Checkpoint, path: str) -> SparsePooling:
    """Return the pooling of a SpladePooling module in a folder of the checkpoint."""
    config = _read_config(checkpoint, f"{path}/config.json")
    ways: dict[str, Pooling] = {"max": "max", "sum": "sum"}
    return SparsePooling(
        config.choice("pooling_strategy", ways, "max"),
        config.choice("activation_function", _SPARSE_ACTIVATIONS, "relu"),
    )


def _read_dense(checkpoint: Checkpoint, path: str, size: int) -> tuple[DenseSpec, int]:
    """Return the layer of a Dense module with `size` inputs, and its number of outputs."""
    config = _read_config(checkpoint, f"{path}/config.json")
    config.refuse("use_residual", False, "a sum with the layer's input is not supported")
    inputs, outputs = config.integer("in_features"), config.integer("out_features")
    if inputs != size:
        raise config.error("in_features", f"the vectors before it have {size} numbers; {_AGAIN}")
    names = {f"torch.nn.modules.{part}.{name}": name for part, name in _paths()}
    full = config.choice("activation_function", names, "torch.nn.modules.activation.Tanh")
    bias = config.flag("bias", True)
    linear = LinearSpec(((f"{path}/linear", outputs),), inputs, bias, exact=True)
    return DenseSpec(linear, _ACTIVATIONS[full]), outputs


def _paths() -> list[tuple[str, str]]:
    return [("linear" if name == "Identity" else "activation", name) for name in _ACTIVATIONS]


def _read_norm(checkpoint: Checkpoint, path: str, size: int) -> tuple[DenseSpec, int]:
    """Return the layer of a LayerNorm module, and its size."""
    config = _read_config(checkpoint, f"{path}/config.json")
    if config.integer("dimension") != size:
        raise config.error("dimension", f"the vectors before it have {size} numbers; {_AGAIN}")
    norm = LayerNormSpec(f"{path}/norm", size, _LAYER_NORM_EPS, bias=True)
    return DenseSpec(None, norm=norm), size


def _read_config(checkpoint: Checkpoint, name: str, *, required: bool = True) -> ConfigJson:
    """Return an object in a file of the checkpoint; empty if the file need not exist.

    Raises:
        ModelError: the file is missing, damaged, or outside of the model's folder.
    """
    name = name.removeprefix("/")  # the folder of a module without a path is the model's
    if Path(name).is_absolute() or "\\" in name or ".." in name.split("/"):
        raise ModelError(
            f"{checkpoint.path / 'modules.json'} names the file {name!r}, which is outside of the "
            "model's folder; download it again."
        )
    read = _read_json(checkpoint, name)
    if read is None and not required:
        read = {}
    if not isinstance(read, Mapping):
        raise ModelError(f"{checkpoint.path / name} is missing or damaged; {_AGAIN}.")
    return ConfigJson(dict(read), str(checkpoint.path / name))


def _read_json(checkpoint: Checkpoint, name: str) -> Any:
    """Return the contents of a JSON file; None: there is no such file."""
    text = checkpoint.read_text(name)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{checkpoint.path / name} is damaged: {error}; download it again."
        ) from None
