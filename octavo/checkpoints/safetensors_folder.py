"""Model folder with safetensors files. Imports torch only when tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from octavo import _native
from octavo.checkpoints.base import Expected, Source
from octavo.checkpoints.folder import Folder, list_files, match_names
from octavo.checkpoints.model_files import without_weights
from octavo.checkpoints.safetensors_header import StoredTensor, read_header
from octavo.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SafetensorsFolder(Folder):
    """`Checkpoint` in safetensors files."""

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, "model.safetensors.index.json", "*.safetensors")

    def open(self, expected: Expected, device: torch.device) -> SafetensorsTensors:
        """Map the files; see `Checkpoint`."""
        files = self.weight_files
        if not files:
            if any(self.path.glob("*.bin")):
                raise ModelError(
                    f"{self.path} holds PyTorch .bin files and no safetensors. They are pickles, "
                    "which can run code when they are read; load_format=pt reads them all the "
                    "same, with torch's restricted unpickler."
                )
            raise without_weights(self.path, "*.safetensors")
        stored = {name: found for file in files for name, found in read_header(file).items()}
        return SafetensorsTensors(stored, match_names(self.path, stored, expected))

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor that is not one of the model's weights.

        Raises:
            ModelError: the folder has no tensor of that name, or its file is damaged.
        """
        for file in self.weight_files:
            if name in read_header(file):
                with safe_open(file, framework="pt") as tensors:
                    tensor: Tensor = tensors.get_tensor(name)
                    return tensor
        raise ModelError(f"{self.path} lacks the tensor {name}.")


class SafetensorsTensors:
    """Mapped tensors of safetensors files.

    Args:
        stored: all tensors.
        names: the stored name of each expected tensor.
    """

    def __init__(self, stored: dict[str, StoredTensor], names: dict[str, str]) -> None:
        self._names = names
        files = {tensor.file for tensor in stored.values()}
        self._open: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in files}
        self._files = {name: tensor.file for name, tensor in stored.items()}

    def read(self, source: Source) -> Tensor:
        """Return a view of the mapped file."""
        name = self._names[source.name]
        tensor: Tensor = self._open[self._files[name]].get_tensor(name)
        return tensor

    def done(self, tensor: Tensor) -> None:
        """Let the system drop the tensor's pages of the mapped file."""
        if tensor.is_contiguous():
            _native.release_pages(tensor.data_ptr(), tensor.nbytes)
