"""Kinds of checkpoints, by the setting `load_format`."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.base import Checkpoint, LoadFormat
from octavo.checkpoints.dummy import Dummy
from octavo.checkpoints.safetensors_folder import SafetensorsFolder
from octavo.checkpoints.sharded_state import ShardedStateFolder
from octavo.checkpoints.torch_folder import TORCH_PATTERN, TorchFolder


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
        case "auto" if not any(path.glob("*.safetensors")) and any(path.glob(TORCH_PATTERN)):
            return TorchFolder(path, load_format)
        case "pt":
            return TorchFolder(path, load_format)
        case "sharded_state":
            return ShardedStateFolder(path, load_format)
    return SafetensorsFolder(path, load_format)
