"""Draft model of another model: find it, read it, and check that the two match."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, SpeculativeConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.hub import resolve_model
from octavo.models.registry import complete_spec, mtp_architectures, read_mtp_spec, read_spec
from octavo.models.spec import ModelSpec
from octavo.models.state_cache import StateCache

if TYPE_CHECKING:
    from octavo.models.heads import MedusaSpec, MTPSpec

_MEDUSA, _EAGLE = ("MedusaModel",), ("EagleLlamaForCausalLM",)
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


@dataclass(frozen=True)
class Draft:
    """Draft model."""

    method: str
    """Method, as in `SpeculativeConfig`."""
    spec: ModelSpec
    path: Path
    num_heads: int | None = None
    """Number of Medusa's heads; None for other methods."""


def find_draft(config: EngineConfig, target: ModelSpec, target_path: Path) -> Draft | None:
    """Return the draft model of the settings, or None if they name none.

    Args:
        config: the settings.
        target: the model that needs drafts.
        target_path: its folder.

    Raises:
        ConfigError: the two models do not match.
        ModelError, HubError: the draft model's folder does not exist or cannot be used.
    """
    speculative = config.speculation.speculative_config
    if speculative is None:
        return None
    if not target.generates:
        raise ConfigError(
            f"speculative_config: this model ({target.architecture}) generates no text here, so "
            "there is nothing to draft; leave it out."
        )
    if not all(cache.rolls_back for cache in target.caches):
        raise ConfigError(
            f"speculative_config is not supported with {target.architecture}: its layers keep a "
            "state from which rejected drafts cannot be removed; leave it out."
        )
    load = config.load
    if speculative.method == "mtp":
        own = open_checkpoint(target_path, load.load_format, config.model.seed)
        return Draft("mtp", _read_mtp(config, own), target_path)
    if speculative.model is None:
        return None
    from octavo.models.heads import read_eagle, read_eagle3, read_medusa

    path = resolve_model(
        speculative.model, download_dir=load.download_dir, load_format=load.load_format
    )
    checkpoint = open_checkpoint(path, load.load_format)
    read = checkpoint.config
    settings = msgspec.structs.replace(config.model, hf_overrides={}, language_model_only=True)
    match speculative.method or _method_of(read):
        case "medusa":
            medusa = read_medusa(read, target)
            _check_num_heads(medusa, speculative)
            completed = complete_spec(medusa, read, checkpoint, settings)
            return Draft("medusa", completed, path, len(medusa.lm_heads))
        case "eagle":
            eagle3 = read.has("draft_vocab_size") or _architecture(read) in _EAGLE3
            eagle = read_eagle3(read, target) if eagle3 else read_eagle(read, target)
            return Draft("eagle", complete_spec(eagle, read, checkpoint, settings), path)
    spec = read_spec(checkpoint, settings)
    if any(isinstance(cache, StateCache) for cache in spec.caches):
        raise ConfigError(
            f"speculative_config: {speculative.model} is a {spec.architecture}, whose layers have "
            "recurrent states; name a draft model with attention in all layers."
        )
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: {speculative.model} has {spec.vocab_size} tokens in its "
            f"vocabulary and {config.model.model} has {target.vocab_size}; use a draft model with "
            "the same tokenizer."
        )
    return Draft("draft_model", spec, path)


def _read_mtp(config: EngineConfig, checkpoint: Checkpoint) -> MTPSpec:
    """Return the MTP layer of the target's checkpoint, which has its tensors.

    Raises:
        ConfigError: the checkpoint has none.
    """
    settings = msgspec.structs.replace(config.model, language_model_only=True)
    spec = read_mtp_spec(checkpoint, settings)
    if spec is None:
        raise ConfigError(
            f"speculative_config: method=mtp needs an MTP layer, and Octavo finds none in "
            f"{config.model.model}. Use another method, or a checkpoint with such a layer "
            f"({', '.join(mtp_architectures())}; not a GGUF file)."
        )
    try:
        checkpoint.open(spec.expected)
    except ModelError as error:
        raise ConfigError(
            f"speculative_config: method=mtp needs the MTP layer of {config.model.model}, which "
            f"cannot be read: {error} Use a checkpoint with this layer, or another method."
        ) from None
    return spec


def _architecture(config: ConfigJson) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _method_of(config: ConfigJson) -> str:
    """Return the speculative method that suits the architecture in a draft's config.json."""
    architecture = _architecture(config)
    if architecture in _MEDUSA:
        return "medusa"
    return "eagle" if architecture in _EAGLE + _EAGLE3 else "draft_model"


def _check_num_heads(spec: MedusaSpec, speculative: SpeculativeConfig) -> None:
    if (speculative.num_speculative_tokens or 0) > len(spec.lm_heads):
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={speculative.num_speculative_tokens} is "
            f"more than the {len(spec.lm_heads)} heads of {speculative.model}; use that or less."
        )
