"""Kinds of checkpoints, by the setting `load_format`.

Each kind is imported when it is opened: a start needs only one.
"""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.base import Checkpoint, LoadFormat
from octavo.checkpoints.folder import MappedFolder
from octavo.checkpoints.mistral.files import has_params_only
from octavo.checkpoints.safetensors_folder import SafetensorsFolder
from octavo.checkpoints.torch_folder import TorchFolder
from octavo.errors import ModelError


def open_checkpoint(
    path: Path,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    mmproj: str | None = "off",
) -> Checkpoint:
    """Return the checkpoint at a path, without reading it.

    Args:
        path: the model's folder, or its GGUF file.
        load_format: auto reads a GGUF file, or *.safetensors, or pytorch_model*.bin if there are
            none, or Mistral's own form if there is params.json and no config.json; gguf,
            safetensors, pt and mistral read only the one kind; sharded_state reads vLLM's files of
            each rank; dummy generates random weights.
        seed: seed of random weights.
        mmproj: of a GGUF file, the file with its tower; off: none; None: the one beside the file,
            if there is any.

    Raises:
        ModelError: the path is a file, and `load_format` needs a folder, or the other way round;
            or mmproj is not usable.
    """
    if path.is_file():
        if load_format not in ("auto", "gguf"):
            raise ModelError(f"{path} is a GGUF file, and load_format={load_format}; leave it out.")
        from octavo.checkpoints.gguf.pair import open_pair

        return open_pair(path, mmproj)
    if mmproj not in (None, "off"):
        raise ModelError(
            f"mmproj={mmproj}: {path} is not a GGUF file, and only such models have a tower in a "
            "file of its own; leave it out."
        )
    if load_format == "gguf":
        raise ModelError(f"load_format=gguf: {path} has no GGUF file; name the file.")
    match load_format:
        case "dummy":
            from octavo.checkpoints.dummy import Dummy

            return Dummy(path, seed)
        case "sharded_state":
            from octavo.checkpoints.sharded_state import ShardedStateFolder

            return ShardedStateFolder(path, load_format)
    return open_mapped_folder(path, load_format)


def open_mapped_folder(path: Path, load_format: LoadFormat = "auto") -> MappedFolder:
    """Return the folder of safetensors or PyTorch files at a path; see `open_checkpoint`."""
    if load_format == "mistral" or (load_format == "auto" and has_params_only(path)):
        from octavo.checkpoints.mistral.folder import MistralFolder  # few models have this form

        return MistralFolder(path, load_format)
    if load_format == "auto":
        is_torch = not _has(path, SafetensorsFolder) and _has(path, TorchFolder)
    else:
        is_torch = load_format == "pt"
    return (TorchFolder if is_torch else SafetensorsFolder)(path, load_format)


def _has(path: Path, kind: type[MappedFolder]) -> bool:
    return any(path.glob(kind.pattern))
