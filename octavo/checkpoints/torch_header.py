"""Header of a PyTorch file."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import FileBytes, open_file, refuse_lfs_pointer
from octavo.checkpoints.torch_file import TorchFileError, read_torch_file
from octavo.errors import ModelError
from octavo.system.tensor import itemsize

# Entries of a file: its tensors and a few more. A tensor needs some 200 bytes of program.
_MAX_ENTRIES = 2**16
_MAX_PROGRAM_NBYTES = 2**22


def read_torch_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file of `torch.save` by name.

    Raises:
        ModelError: the file is damaged, or of another kind.
    """
    try:
        refuse_lfs_pointer(file)
        with open_file(file) as stream:
            tensors = read_torch_file(
                FileBytes(stream),
                max_entries=_MAX_ENTRIES,
                max_program_nbytes=_MAX_PROGRAM_NBYTES,
            )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged or cut off ({error}); download the file again."
        ) from None
    except TorchFileError as error:
        raise ModelError(f"{file} cannot be read: {error}.") from None
    if not isinstance(tensors, dict):
        raise ModelError(f"{file} holds one tensor, not a dictionary of tensors.")
    for name, tensor in tensors.items():
        if tensor.begin % itemsize(tensor.dtype):
            raise ModelError(f"{file}: {name} is not aligned; save the file again with torch.save.")
    return {
        name: StoredTensor(file, it.shape, it.dtype, it.begin, it.strides)
        for name, it in tensors.items()
    }
