"""Kinds of checkpoints, by the setting `load_format`."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.base import Checkpoint, LoadFormat
from octavo.checkpoints.dummy import Dummy
from octavo.checkpoints.safetensors_folder import SafetensorsFolder
from octavo.checkpoints.sharded_state import ShardedStateFolder
from octavo.checkpoints.torch_folder import TorchFolder


def open_checkpoint(path: Path, load_format: LoadFormat = "auto", seed: int = 0) -> Checkpoint:
    """Return the checkpoint at a path, without reading it.

    Args:
        path: the model's folder.
        load_format: auto and safetensors read *.safetensors; pt reads pytorch_model*.bin;
            sharded_state reads vLLM's files of each rank; dummy generates random weights.
        seed: seed of random weights.
    """
    match load_format:
        case "dummy":
            return Dummy(path, seed)
        case "pt":
            return TorchFolder(path, load_format)
        case "sharded_state":
            return ShardedStateFolder(path, load_format)
    return SafetensorsFolder(path, load_format)
