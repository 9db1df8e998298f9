"""Poolers of a model: those of its family, and those that a sentence-transformers folder names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.pooler import PoolerSpec, Pooling
from octavo.models.spec import ModelSpec

_OWN: tuple[str, ...] = ("sentence_transformers.models.", "sentence_transformers.base.modules.")
_OWN += ("sentence_transformers.sentence_transformer.modules.",)
"""Beginnings of the names of sentence-transformers' own modules, old and new."""
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


def add_poolers(spec: ModelSpec, config: ConfigJson, checkpoint: Checkpoint) -> ModelSpec:
    """Return a spec with the poolers of its checkpoint, and with those that any model has.

    A sentence-transformers folder (modules.json) decides how texts become vectors, and the longest
    text. Without one, the vector is the last token's; of an encoder, the first one's.

    Raises:
        ModelError: a file is damaged, or names a module that Octavo does not have.
    """
    poolers = {pooler.task: pooler for pooler in spec.poolers}
    modules = _read_json(checkpoint, "modules.json")
    dimensions = _read_dimensions(config)
    if modules is not None:
        pooling, normalizes = _read_modules(checkpoint, modules)
        embed = PoolerSpec(
            "embed",
            pooling,
            spec.hidden_size * len(pooling),
            activation="normalize" if normalizes else "none",
            dimensions=dimensions,
        )
        poolers = {"embed": embed} | {t: p for t, p in poolers.items() if t != "embed"}
        spec = replace(spec, max_model_len=_read_max_len(checkpoint, spec.max_model_len))
    elif not poolers or "embed" in poolers:
        default: tuple[Pooling] = ("cls",) if spec.sees_all else ("last",)
        embed = PoolerSpec(
            "embed", default, spec.hidden_size, activation="normalize", dimensions=dimensions
        )
        poolers.setdefault("embed", embed)
    if "embed" in poolers:
        tokens = PoolerSpec("token_embed", ("all",), spec.hidden_size, activation="normalize")
        poolers.setdefault("token_embed", tokens)
    return replace(spec, poolers=tuple(poolers.values()))


def _read_modules(checkpoint: Checkpoint, modules: object) -> tuple[tuple[Pooling, ...], bool]:
    """Return the ways of pooling, and True if vectors are normalized."""
    where = checkpoint.path / "modules.json"
    if not isinstance(modules, list) or not all(isinstance(it, dict) for it in modules):
        raise ModelError(f"{where} is damaged: it must be a list of modules; download it again.")
    pooling: tuple[Pooling, ...] = ()
    normalizes = False
    for module in modules:
        full, path = str(module.get("type")), str(module.get("path", ""))
        name = full.rpartition(".")[2]
        if not full.startswith(_OWN):
            raise ModelError(
                f"{where} names the module {full!r}, which is code of the model; Octavo never runs "
                "such code. Use a model with sentence-transformers' own modules."
            )
        if name == "Pooling":
            pooling = _read_pooling(checkpoint, path)
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            raise ModelError(
                f"{where} names the module {name}, which Octavo does not have yet; it has "
                "Transformer, Pooling and Normalize."
            )
    if not pooling:
        raise ModelError(f"{where} names no Pooling module; download the folder again.")
    return pooling, normalizes


def _read_pooling(checkpoint: Checkpoint, path: str) -> tuple[Pooling, ...]:
    """Return the ways of pooling of a Pooling module in a folder of the checkpoint."""
    if path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/"):
        raise ModelError(
            f"{checkpoint.path / 'modules.json'} names the folder {path!r}, which is outside of "
            "the model's folder; download it again."
        )
    name = f"{path}/config.json" if path else "config.json"
    config = _read_json(checkpoint, name)
    where = checkpoint.path / name
    if not isinstance(config, Mapping):
        raise ModelError(f"{where} is missing or damaged; download the folder again.")
    modes = config.get("pooling_mode")
    if modes is not None:
        names = [modes] if isinstance(modes, str) else modes
        if not isinstance(names, list) or not names or any(n not in _NAMES for n in names):
            raise ModelError(f"{where}: pooling_mode={modes!r}; supported: {', '.join(_NAMES)}.")
        found = tuple(mode for n, mode in _NAMES.items() if n in names)
    else:
        found = tuple(mode for field, mode in _MODES.items() if config.get(field) is True)
    if not found:
        raise ModelError(f"{where} names no way of pooling; download the folder again.")
    return found


def _read_max_len(checkpoint: Checkpoint, most: int) -> int:
    """Return the longest text of a sentence-transformers folder, in tokens."""
    config = _read_json(checkpoint, "sentence_bert_config.json")
    wanted = config.get("max_seq_length") if isinstance(config, Mapping) else None
    if wanted is None:
        return most
    if type(wanted) is not int or wanted < 1:
        where = checkpoint.path / "sentence_bert_config.json"
        raise ModelError(f"{where}: max_seq_length={wanted!r} is not a positive number.")
    return min(wanted, most)


def _read_dimensions(config: ConfigJson) -> tuple[int, ...] | None:
    """Return the lengths to which the model's vectors may be cut; see `PoolerSpec.dimensions`."""
    given = config.get("matryoshka_dimensions")
    if given is None:
        return () if config.flag("is_matryoshka", False) else None
    if not isinstance(given, list) or not all(type(n) is int and n > 0 for n in given):
        raise config.error("matryoshka_dimensions", "it must be a list of positive numbers")
    return tuple(given)


def _read_json(checkpoint: Checkpoint, name: str) -> Any:
    """Return the contents of a JSON file; None: there is no such file."""
    text = checkpoint.read_text(name)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ModelError(
            f"{checkpoint.path / name} is damaged: {error}; download it again."
        ) from None
