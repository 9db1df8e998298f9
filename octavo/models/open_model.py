"""Checkpoint of a config's model, with the adapter that is merged into it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.models.hub import resolve_adapter


def open_model(config: EngineConfig, path: Path, dtype: str = "float32") -> Checkpoint:
    """Return the checkpoint of a model, with the adapter of the setting `lora_merge`, if any.

    Args:
        config: the settings.
        path: the model's folder, or its GGUF file.
        dtype: type of the tensors that the adapter changes: float32, float16 or bfloat16.

    Raises:
        AdapterError: the adapter does not exist.
        ModelError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(path, config.load.load_format, config.model.seed)
    folder = find_merged(config)
    if folder is None:
        return checkpoint
    from octavo.models.merge import MergedCheckpoint

    return MergedCheckpoint(checkpoint, folder, dtype)


def find_merged(config: EngineConfig) -> Path | None:
    """Return the folder of the adapter of `lora_merge`, or None if that is not set.

    Raises:
        AdapterError: the adapter does not exist, or cannot be downloaded.
    """
    name = config.lora.lora_merge
    if name is None:
        return None
    return resolve_adapter(name, download_dir=config.load.download_dir).absolute()


def with_local_adapter(config: EngineConfig) -> EngineConfig:
    """Return the settings, in which `lora_merge` is a path: all processes read the same files.

    Raises:
        AdapterError: see `find_merged`.
    """
    folder = find_merged(config)
    if folder is None:
        return config
    lora = msgspec.structs.replace(config.lora, lora_merge=str(folder))
    return msgspec.structs.replace(config, lora=lora)
