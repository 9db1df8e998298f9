"""Model folder with PyTorch files. Imports torch only when tensors are read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Expected, Source, Tensors
from octavo.checkpoints.folder import Folder, list_files, match_names
from octavo.checkpoints.model_files import refuse_lfs_pointer, require_file, without_weights
from octavo.checkpoints.safetensors_header import StoredTensor
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor, from_dlpack

if TYPE_CHECKING:
    from torch import Tensor


class TorchFolder(Folder):
    """`Checkpoint` in files of `torch.save`."""

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, "pytorch_model.bin.index.json", "pytorch_model*.bin")

    def open(self, expected: Expected) -> TorchTensors:
        """Map the files until all tensors are loaded; see `Checkpoint`."""
        files = self.weight_files
        if not files:
            raise without_weights(self.path, "pytorch_model*.bin")
        tensors: dict[str, Tensor] = {}
        stored: dict[str, StoredTensor] = {}
        for file in files:
            state = _load(file)
            tensors |= state
            stored |= {
                name: StoredTensor(file, tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for name, t in state.items()
            }
        names = match_names(self.path, stored, expected)
        return TorchTensors({name: tensors[found] for name, found in names.items()})


class TorchTensors(Tensors):
    """Tensors in memory.

    Args:
        tensors: tensors by the names that the model expects.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, source: Source) -> HostTensor:
        """Implement `Tensors`."""
        return from_dlpack(self._tensors[source.name])


def _load(file: Path) -> dict[str, Tensor]:
    import torch
    from torch import Tensor

    require_file(file)
    refuse_lfs_pointer(file)
    try:
        # Files older than torch 1.6 are not zip archives and cannot be mapped.
        state = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as error:  # a broken file may cause any exception in the unpickler
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "empty"
        raise ModelError(
            f"{file} is damaged, cut off, or holds more than tensors ({reason})."
        ) from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ModelError(f"{file} must hold a dictionary of tensors.")
    return state
