"""Model folder with safetensors files."""

from __future__ import annotations

from pathlib import Path

from octavo import _native
from octavo.checkpoints.base import Expected, Source
from octavo.checkpoints.folder import Folder, list_files, match_names
from octavo.checkpoints.model_files import without_weights
from octavo.checkpoints.safetensors_header import MappedFile, StoredTensor, read_header
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor


class SafetensorsFolder(Folder):
    """`Checkpoint` in safetensors files."""

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, "model.safetensors.index.json", "*.safetensors")

    def open(self, expected: Expected) -> SafetensorsTensors:
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

    def read_tensor(self, name: str) -> HostTensor:
        """Return a tensor that is not one of the model's weights.

        Raises:
            ModelError: the folder has no tensor of that name, or its file is damaged.
        """
        for file in self.weight_files:
            if stored := read_header(file).get(name):
                return MappedFile(file).tensor(stored)
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
        self._open = {file: MappedFile(file) for file in files}
        self._stored = stored

    def read(self, source: Source) -> HostTensor:
        """Return a view of the mapped file."""
        stored = self._stored[self._names[source.name]]
        return self._open[stored.file].tensor(stored)

    def done(self, tensor: HostTensor) -> None:
        """Let the system drop the tensor's pages of the mapped file."""
        if tensor.is_contiguous():
            _native.release_pages(tensor.data_ptr(), tensor.nbytes)
