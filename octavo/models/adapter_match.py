"""Check of an adapter's description against a model, before its numbers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.checkpoints.adapter import MERGE, AdapterFile
from octavo.checkpoints.base import shorten_names
from octavo.checkpoints.model_files import printable
from octavo.errors import AdapterError
from octavo.models.adaptable_model import (
    EMBED,
    LM_HEAD,
    UNTARGETED,
    AdaptableModel,
    AdaptableModule,
    target_of,
)
from octavo.models.expert_adapters import FusedMatch, bare_module, check_single


@dataclass(frozen=True)
class AdapterMatch:
    """Modules of a model that an adapter changes, and those that it replaces."""

    modules: Mapping[str, str]
    """Name in the file of each changed module."""
    replaced: Mapping[str, str]
    """Name in the file of each replaced module."""
    fused: Mapping[str, FusedMatch]
    """Changed modules with fused experts, by other names."""


def match_adapter(file: AdapterFile, model: AdaptableModel, max_lora_rank: int) -> AdapterMatch:
    """Return the modules of a model that belong to an adapter.

    Args:
        file: the adapter.
        model: the model.
        max_lora_rank: the setting of this name.

    Raises:
        AdapterError: the adapter belongs to another model, or a rank is above `max_lora_rank`.
    """
    if (token := max(file.invocation_tokens, default=0)) >= model.vocab_size:
        raise AdapterError(
            f"{file.path}: the invocation token {token} is none of the {model.vocab_size} tokens "
            f"of {model.architecture}. Load an adapter of this model."
        )
    modules, containers = _match_modules(file, model)
    for name, stored in modules.items():
        _check_factors(file, stored, model.modules.get(name), max_lora_rank)
    for stored, shape in file.copies.items():
        module = model.modules.get(model.by_stored(file).get(stored, ""))
        if module is not None:
            _check_shape(file, f"the copy of {printable(stored)} of the base is", shape, module)
    fused = {
        f"{name}{inner}": model.fused.match(name, f"{stored}{inner}", file, max_lora_rank)
        for stored, inner, name in containers
    }
    for match in fused.values():
        parts = [] if match.fused is None else [part.module for part in match.fused.parts]
        if others := [part for part in parts if part in model.others]:
            raise _refused(file, model.others[others[0]], [match.stored], others)
    replaced = _match_replaced(file, model)
    twice = [stored for name, stored in replaced.items() if name in modules]
    if len(fused) < len(containers) or len(replaced) < len(file.trained) or twice:
        raise AdapterError(
            f"{file.file} changes or replaces a module under two names, or does both"
            f"{': ' + shorten_names(twice) if twice else ''}; save the adapter again."
        )
    check_single(file, fused, set(modules))
    of_experts = [stored for name, stored in modules.items() if name in model.fused.modules]
    of_experts += [match.stored for match in fused.values()]
    if any(len(file.factors[stored].tensors) > 2 for stored in of_experts):
        raise AdapterError(
            f"{file.file} changes {shorten_names(of_experts)}: DoRA (use_dora) and biases of B "
            f"(lora_bias) of experts are not supported. Train the adapter without them, or {MERGE}."
        )
    return AdapterMatch(modules, replaced, fused)


def _match_modules(
    file: AdapterFile, model: AdaptableModel
) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Return the modules that an adapter changes.

    Returns:
        The name in the file of each module. And the modules with fused experts: the name in the
        file without its end, the end, and the module.

    Raises:
        AdapterError: the model does not have a module, or adapters cannot change it.
    """
    by_stored, containers = model.by_stored(file), model.containers(file)
    matched: dict[str, str] = {}
    fused: list[tuple[str, str, str]] = []
    refused: dict[str, list[str]] = {}
    unknown = []
    for stored in file.factors:
        name, (bare, inner) = by_stored.get(stored), bare_module(stored)
        if name is None and bare in containers:
            fused.append((bare, inner, containers[bare]))
            continue
        if name is None and model.leaves_out(stored):
            continue
        if name is None:
            unknown.append(stored)
        elif name in model.others:
            refused.setdefault(model.others[name], []).append(stored)
        elif name in matched:
            raise AdapterError(
                f"{file.file} has {printable(matched[name])} and {printable(stored)}, which are "
                "the same module; save the adapter again."
            )
        else:
            matched[name] = stored
    if unknown:
        base = "" if file.base is None else f" It was trained for {printable(file.base)}."
        raise AdapterError(
            f"{file.file} changes {len(unknown)} modules that {model.architecture} does not have: "
            f"{shorten_names(sorted(unknown))}.{base} Load an adapter of this model."
        )
    if not matched and not fused and not refused:
        raise AdapterError(
            f"{file.file} only changes parts of {model.architecture} that Octavo does not compute, "
            f"such as {printable(next(iter(file.factors)))}. Load an adapter of its text part."
        )
    for kind, names in refused.items():
        raise _refused(file, kind, names, [by_stored[stored] for stored in names])
    return matched, fused


def _refused(file: AdapterFile, kind: str, stored: list[str], modules: list[str]) -> AdapterError:
    """Return the error for modules that adapters cannot change.

    Args:
        file: the adapter.
        kind: their kind, see `AdaptableModel.others`.
        stored: their names in the file.
        modules: the modules.
    """
    if kind == UNTARGETED:
        ends = ", ".join(sorted(set(map(target_of, modules))))
        return AdapterError(
            f"{file.file} changes {shorten_names(stored)}, and lora_target_modules leaves out "
            f"{ends}; add it to the setting, or train the adapter without."
        )
    return AdapterError(
        f"{file.file} changes {shorten_names(stored)}: LoRA of {kind} is not supported. Train "
        f"the adapter without, or {MERGE}."
    )


def _match_replaced(file: AdapterFile, model: AdaptableModel) -> dict[str, str]:
    """Return the name in the file of each module that the adapter replaces.

    Raises:
        AdapterError: the model does not have a module, or adapters cannot replace it.
    """
    by_stored = model.by_stored(file)
    matched: dict[str, str] = {}
    for stored, tensors in file.trained.items():
        name = by_stored.get(stored, stored)
        known, module = model.replaceable.get(name), model.modules.get(name)
        found = {kind: tensor.shape for kind, tensor in tensors.items()}
        if module is not None and "weight" in found:
            _check_shape(file, f"{printable(stored)} is", found["weight"], module)
        if name not in model.elsewhere and known is None:
            raise AdapterError(
                f"{file.file} replaces {printable(stored)} (modules_to_save). "
                f"{_advice(module)}, or {MERGE}."
            )
        if known is not None and found != known.shapes:
            raise AdapterError(
                f"{file.file}: {printable(stored)} has {_shapes(found)}, and that of the model has "
                f"{_shapes(known.shapes)}. Load an adapter of a model with the same head."
            )
        matched[name] = stored
    return matched


def _advice(module: AdaptableModule | None) -> str:
    """Return what to do about a module that adapters cannot replace."""
    for layer, name in ((EMBED, "embed_tokens"), (LM_HEAD, "lm_head")):
        if module is not None and any(use.shape.layer == layer for use in module.uses):
            return (
                f"Set lora_modules_to_save={name}, with which memory is planned for it in each "
                "adapter; train factors of it instead (target_modules)"
            )
    return (
        "Adapters can replace the embedding of tokens, the LM head and heads of classifiers only. "
        "Train factors of other modules instead (target_modules)"
    )


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the shapes of tensors for an error message."""
    return " and ".join(f"{kind} {list(shape)}" for kind, shape in sorted(shapes.items()))


def _check_factors(
    file: AdapterFile, stored: str, module: AdaptableModule | None, max_lora_rank: int
) -> None:
    """Check rank and shapes of a module's factors.

    Raises:
        AdapterError: the rank is too large, or the adapter belongs to another model.
    """
    factors = file.factors[stored]
    if factors.rank > max_lora_rank:
        raise AdapterError(
            f"{file.file}: {printable(stored)} has rank {factors.rank}, and max_lora_rank="
            f"{max_lora_rank}; raise max_lora_rank."
        )
    if module is None:  # another stage checks the shapes
        return
    if factors.of_embedding != module.is_embedding:
        raise AdapterError(
            f"{file.file}: the factors of {printable(stored)} are those of "
            f"{_kind_of(factors.of_embedding)}, and the model has {_kind_of(module.is_embedding)} "
            "there. Load an adapter of this model."
        )
    found = factors.b.shape[0], factors.a.shape[1]
    if factors.of_embedding:
        found = found[::-1]
    _check_shape(file, f"the factors of {printable(stored)} change", found, module)


def _kind_of(is_embedding: bool) -> str:
    return "an embedding" if is_embedding else "a linear layer"


def _check_shape(
    file: AdapterFile, what: str, found: tuple[int, ...], module: AdaptableModule
) -> None:
    """Raise `AdapterError` if a weight in the file has another shape than the module's.

    Args:
        file: the file.
        what: beginning of a message about the weight.
        found: the weight's shape.
        module: the module.
    """
    if found == module.weight_shape:
        return
    added = found[0] - module.weight_shape[0] if found else 0
    if added > 0 and any(use.shape.layer in (EMBED, LM_HEAD) for use in module.uses):
        advice = f"The training has added {added} tokens, which is not supported: {MERGE}."
    else:
        base = "" if file.base is None else f"It was trained for {printable(file.base)}. "
        advice = f"{base}Load an adapter of this model."
    raise AdapterError(
        f"{file.file}: {what} a weight {list(found)}, and that of the model is "
        f"{list(module.weight_shape)}. {advice}"
    )
