"""Model folder with safetensors files."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.base import Expected
from octavo.checkpoints.folder import Folder, list_files, match_names
from octavo.checkpoints.mapped_file import MappedFile, MappedTensors
from octavo.checkpoints.model_files import without_weights
from octavo.checkpoints.safetensors_header import read_header
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor


class SafetensorsFolder(Folder):
    """`Checkpoint` in safetensors files."""

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, "model.safetensors.index.json", "*.safetensors")

    def open(self, expected: Expected) -> MappedTensors:
        """Map the files; see `Checkpoint`."""
        files = self.weight_files
        if not files:
            if any(self.path.glob("pytorch_model*.bin")):
                raise ModelError(
                    f"{self.path} holds PyTorch .bin files and no safetensors; "
                    "set load_format to auto or pt."
                )
            raise without_weights(self.path, "*.safetensors")
        stored = {name: found for file in files for name, found in read_header(file).items()}
        return MappedTensors(stored, match_names(self.path, stored, expected))

    def read_tensor(self, name: str) -> HostTensor:
        """Return a tensor that is not one of the model's weights.

        Raises:
            ModelError: the folder has no tensor of that name, or its file is damaged.
        """
        for file in self.weight_files:
            if stored := read_header(file).get(name):
                return MappedFile(file).tensor(stored)
        raise ModelError(f"{self.path} lacks the tensor {name}.")
