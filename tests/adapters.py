"""Adapters with random numbers, as PEFT and llama.cpp write them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.models.adaptable_model import EMBED, AdaptableModel
from octavo.models.adapters import Adapter, Replacement, Slice
from octavo.models.blocks.base import is_adaptable
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.models.weight_norms import WeightNorms

PREFIX = "base_model.model."


def make_factors(
    model: AdaptableModel,
    modules: Iterable[str] | None = None,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    more: str = "",
) -> dict[str, Tensor]:
    """Return random factors of some modules of a model, or of all, with PEFT's names.

    `more` is "lora_magnitude_vector" for DoRA, or "lora_B.bias": then embeddings have no factors.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in model.modules if modules is None else modules:
        module = model.modules[name]
        if module.is_embedding and more:
            continue
        a = torch.randn(rank, module.inputs, generator=generator)
        b = torch.randn(module.outputs, rank, generator=generator)
        first, second = "lora_A.weight", "lora_B.weight"
        if module.is_embedding:
            first, second = "lora_embedding_A", "lora_embedding_B"
            b /= 16
        else:
            a /= module.inputs**0.5
        tensors[f"{PREFIX}{name}.{first}"] = a.to(dtype)
        tensors[f"{PREFIX}{name}.{second}"] = (b / rank**0.5).to(dtype)
        if more:
            numbers = 0.5 + torch.rand(module.outputs, generator=generator)
            tensors[f"{PREFIX}{name}.{more}"] = numbers.to(dtype)
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """Write an adapter's folder; `fields` are those of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


@dataclass(frozen=True)
class LoadedAdapter:
    """Factors of an adapter, and the hash of its content."""

    content_hash: str
    slices: dict[str, list[Slice]]
    """Slices of each linear layer, in the order of the outputs."""
    replaced: dict[str, Replacement]
    """Layers in place of the model's."""


def load_all(adapter: Adapter, norms: WeightNorms | None = None) -> LoadedAdapter:
    """Read an adapter into memory; `norms` as in `Adapter.read`."""
    found: dict[str, list[Slice]] = {}
    whole: dict[str, Replacement] = {}
    content_hash = adapter.read(
        lambda layer, one: found.setdefault(layer, []).append(one),
        norms,
        whole.__setitem__,
    )
    slices = {layer: sorted(own, key=lambda it: it.begin) for layer, own in sorted(found.items())}
    return LoadedAdapter(content_hash, slices, whole)


def builtin_model() -> AdaptableModel:
    """Return the built-in model."""
    config = EngineConfig()
    path, _ = resolve_folders(config)
    spec = read_spec(open_checkpoint(path, "auto"), config.model)
    names = {weight.name.removesuffix("weight") for weight in spec.weights()}
    return AdaptableModel(spec, {EMBED, *filter(is_adaptable, names)})


def deltas(loaded: LoadedAdapter, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the changes of the weights of linear layers, in float64.

    Args:
        loaded: the adapter.
        shapes: shape of the weight of each layer.
    """
    found: dict[str, NDArray[np.float64]] = {name: np.zeros(it) for name, it in shapes.items()}
    for name, slices in loaded.slices.items():
        for it in slices:
            b, a = (np.asarray(x.numpy(), np.float64) for x in (it.b, it.a))
            found[name][it.begin : it.end] += it.scale * (b @ a)
    return found
