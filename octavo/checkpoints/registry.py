"""Kinds of checkpoints, by the setting `load_format`."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.base import Checkpoint, LoadFormat
from octavo.checkpoints.dummy import Dummy
from octavo.checkpoints.folder import MappedFolder
from octavo.checkpoints.safetensors_folder import SafetensorsFolder
from octavo.checkpoints.sharded_state import ShardedStateFolder
from octavo.checkpoints.torch_folder import TorchFolder


def open_checkpoint(path: Path, load_format: LoadFormat = "auto", seed: int = 0) -> Checkpoint:
    """Return the checkpoint at a path, without reading it.

    Args:
        path: the model's folder.
        load_format: auto reads *.safetensors, or pytorch_model*.bin if there are none;
            safetensors and pt read only the one or the other; sharded_state reads vLLM's files of
            each rank; dummy generates random weights.
        seed: seed of random weights.
    """
    match load_format:
        case "dummy":
            return Dummy(path, seed)
        case "sharded_state":
            return ShardedStateFolder(path, load_format)
    return open_mapped_folder(path, load_format)


def open_mapped_folder(path: Path, load_format: LoadFormat = "auto") -> MappedFolder:
    """Return the folder of safetensors or PyTorch files at a path; see `open_checkpoint`."""
    if load_format == "auto":
        is_torch = not _has(path, SafetensorsFolder) and _has(path, TorchFolder)
    else:
        is_torch = load_format == "pt"
    return (TorchFolder if is_torch else SafetensorsFolder)(path, load_format)


def _has(path: Path, kind: type[MappedFolder]) -> bool:
    return any(path.glob(kind.pattern))
