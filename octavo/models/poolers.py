"""Choice of what a model returns: tokens, or vectors and scores by its poolers."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.config import ModelConfig, PoolerConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.blocks.pooler import PoolerSpec, Pooling
from octavo.models.late_interaction import add_late_pooler, is_late
from octavo.models.sentence_modules import (
    SentenceModules,
    SparsePooling,
    read_max_len,
    read_modules,
    read_sentences,
)
from octavo.models.spec import ModelSpec
from octavo.models.variants import without_lm_head

_POOLING: dict[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}


def add_poolers(
    spec: ModelSpec, config: ConfigJson, checkpoint: Checkpoint, settings: ModelConfig
) -> ModelSpec:
    """Return a spec with the poolers of its checkpoint, and with those that any model has.

    A sentence-transformers folder (modules.json) decides how texts become vectors, and the longest
    text. Without one, the vector is the last token's; of an encoder, the first one's. A pooling
    model has no LM head.

    Args:
        spec: the model; its poolers are those of its architecture.
        config: its config.json.
        checkpoint: its other files.
        settings: `runner`, `convert` and `pooler_config`; see `docs/pooling.md`.

    Raises:
        ConfigError: the settings ask for what the model does not have.
        ModelError: a file is damaged, or names a module that Octavo does not have.
    """
    modules = read_modules(checkpoint, spec.hidden_size)
    if not _pools(spec, settings, published=modules is not None):
        return replace(spec, poolers=())
    if not _generates(spec, settings, published=modules is not None):
        spec = without_lm_head(spec)
    poolers = {pooler.task: pooler for pooler in spec.poolers}
    if is_late(spec, modules):
        spec = add_late_pooler(spec, config, checkpoint, modules)
        sentences, cut = read_sentences(checkpoint, "max_sim")
        spec = replace(spec, sentences=sentences)
        poolers = {
            "token_embed": replace(spec.poolers[0], cut=cut, dimensions=_read_dimensions(config))
        }
        modules = None
    elif modules is not None and modules.sparse is not None:
        spec, poolers = _of_sparse(spec, checkpoint, modules.sparse)
        modules = None
    scores = any("classify" in task for task in poolers)
    if modules is not None and (modules.pooling or not scores):
        spec, embed = _of_sentences(spec, config, checkpoint, modules)
        poolers = {"embed": embed} | {t: p for t, p in poolers.items() if t != "embed"}
    elif not poolers or "embed" in poolers:
        default: tuple[Pooling, ...] = ("cls",) if spec.sees_all else ("last",)
        embed = poolers.get("embed") or PoolerSpec(
            "embed", default, spec.hidden_size, activation="normalize"
        )
        poolers["embed"] = replace(embed, dimensions=_read_dimensions(config))
    if "embed" in poolers:
        poolers.setdefault("token_embed", _of_tokens(spec, modules))
    wanted = settings.convert
    if wanted in ("embed", "classify") and wanted not in poolers:
        raise ConfigError(
            f"convert={wanted}: this model ({spec.architecture}) can do {', '.join(poolers)}; "
            "leave convert out."
        )
    changes = settings.pooler_config
    if changes is not None:
        poolers = {task: _change(pooler, changes) for task, pooler in poolers.items()}
    return replace(spec, poolers=tuple(poolers.values()))


def _pools(spec: ModelSpec, settings: ModelConfig, *, published: bool) -> bool:
    """Return True if the model has poolers.

    Raises:
        ConfigError: `runner` and `convert` do not fit the model, or each other.
    """
    runner, convert, name = settings.runner, settings.convert, spec.architecture
    if spec.model_class != ModelSpec.model_class:
        convert = "none"  # a package's own class computes the model
    is_own = bool(spec.poolers) or not spec.generates or (published and convert != "none")
    if runner == "generate":
        if not spec.generates:
            raise ConfigError(
                f"runner=generate: this model ({name}) generates no text; leave runner out."
            )
        if convert in ("embed", "classify"):
            raise ConfigError(
                f"runner=generate and convert={convert} contradict each other; leave one out."
            )
        return False
    if convert != "none" or is_own:
        return True
    if runner == "pooling":
        raise ConfigError(
            f"runner=pooling: this model ({name}) generates text, and convert=none forbids "
            "vectors; leave convert out."
        )
    return False


def _generates(spec: ModelSpec, settings: ModelConfig, *, published: bool) -> bool:
    """Return True if a model with poolers also generates text."""
    converted = settings.runner == "pooling" or settings.convert in ("embed", "classify")
    return spec.generates and not (published or converted or spec.poolers)


def _of_sentences(
    spec: ModelSpec, config: ConfigJson, checkpoint: Checkpoint, modules: SentenceModules
) -> tuple[ModelSpec, PoolerSpec]:
    """Return the model and the pooler that a sentence-transformers folder describes."""
    where = checkpoint.path
    if not modules.pooling:
        raise ModelError(
            f"{where / 'modules.json'} names no Pooling module; download the folder again."
        )
    sentences, cut = read_sentences(checkpoint)
    if cut is not None and cut > modules.size:
        raise ModelError(
            f"{where / 'config_sentence_transformers.json'}: truncate_dim={cut} is more than the "
            f"{modules.size} numbers of a vector; download the folder again."
        )
    embed = PoolerSpec(
        "embed",
        modules.pooling,
        modules.size,
        modules.dense,
        "normalize",
        activates=modules.normalizes,
        dimensions=_read_dimensions(config),
        cut=cut,
    )
    length = read_max_len(checkpoint, spec.max_model_len)
    return replace(spec, max_model_len=length, sentences=sentences), embed


def _of_sparse(
    spec: ModelSpec, checkpoint: Checkpoint, sparse: SparsePooling
) -> tuple[ModelSpec, dict[str, PoolerSpec]]:
    """Return the model and the pooler that a folder of a sparse encoder describes."""
    sentences, _ = read_sentences(checkpoint, "dot")
    length = read_max_len(checkpoint, spec.max_model_len)
    (pooler,) = spec.poolers
    *layers, last = pooler.token_dense
    last = replace(last, activation=sparse.activation)
    pooler = replace(pooler, pooling=(sparse.pooling,), token_dense=(*layers, last))
    return replace(spec, max_model_len=length, sentences=sentences), {"embed": pooler}


def _of_tokens(spec: ModelSpec, modules: SentenceModules | None) -> PoolerSpec:
    """Return the pooler of a vector for each token: after the Dense modules, as in vLLM."""
    pooler = PoolerSpec("token_embed", ("all",), spec.hidden_size, activation="normalize")
    if modules is None or len(modules.pooling) != 1:
        return pooler
    return replace(pooler, size=modules.size, dense=modules.dense)


def _read_dimensions(config: ConfigJson) -> tuple[int, ...] | None:
    """Return the lengths to which the model's vectors may be cut; see `PoolerSpec.dimensions`."""
    given = config.get("matryoshka_dimensions")
    if given is None:
        return () if config.flag("is_matryoshka", False) else None
    if not isinstance(given, list) or not all(type(n) is int and n > 0 for n in given):
        raise config.error("matryoshka_dimensions", "it must be a list of positive numbers")
    return tuple(given)


def _change(pooler: PoolerSpec, changes: PoolerConfig) -> PoolerSpec:
    """Return a pooler with the settings of `pooler_config`.

    Raises:
        ConfigError: the pooler cannot have a setting.
    """
    of_tokens, kind = pooler.pooling == ("all",), changes.of_text
    if kind is not None and not of_tokens:
        pooling = (_POOLING[kind],)
        if len(pooler.pooling) > 1 and pooler.dense:
            raise ConfigError(
                f"pooler_config: the layers after the pooling need {len(pooler.pooling)} vectors, "
                f"and pooling_type={kind} gives one; leave it out."
            )
        size = pooler.size // (1 if pooler.dense else len(pooler.pooling))
        pooler = replace(pooler, pooling=pooling, size=size)
    if changes.use_activation is not None:
        pooler = replace(pooler, activates=changes.use_activation)
    if changes.dimensions is not None and pooler.task == "embed":
        if (reason := pooler.refusal(changes.dimensions)) is not None:
            raise ConfigError(f"pooler_config: dimensions={changes.dimensions}: {reason}")
        pooler = replace(pooler, cut=changes.dimensions)
    if of_tokens and changes.step_tag_id is not None:
        pooler = replace(pooler, step_tag_id=changes.step_tag_id)
    ids = changes.returned_token_ids
    if ids and "classify" in pooler.task:
        if max(ids) >= pooler.size:
            raise ConfigError(
                f"pooler_config: returned_token_ids={ids}: the model has {pooler.size} classes."
            )
        pooler = replace(pooler, returned_token_ids=tuple(ids))
    return pooler
