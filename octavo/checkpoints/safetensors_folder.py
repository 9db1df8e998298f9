"""Model folder with safetensors files."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.folder import MappedFolder
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.safetensors_header import read_header


class SafetensorsFolder(MappedFolder):
    """`Checkpoint` in safetensors files."""

    index = "model.safetensors.index.json"
    pattern = "*.safetensors"

    def read_header(self, file: Path) -> dict[str, StoredTensor]:
        """Implement `MappedFolder`."""
        return read_header(file)
