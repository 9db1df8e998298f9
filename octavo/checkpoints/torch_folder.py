"""Model folder with PyTorch files."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.folder import MappedFolder
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.torch_header import read_torch_header


class TorchFolder(MappedFolder):
    """`Checkpoint` in files of `torch.save`."""

    index = "pytorch_model.bin.index.json"
    pattern = "pytorch_model*.bin"

    def read_header(self, file: Path) -> dict[str, StoredTensor]:
        """Implement `MappedFolder`."""
        return read_torch_header(file)
