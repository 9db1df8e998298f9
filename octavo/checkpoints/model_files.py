"""Errors for files and folders that cannot be read as a model, with solutions."""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path

from octavo.checkpoints.mistral.files import PARAMS, WEIGHTS
from octavo.errors import ModelError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_SHOWN = 200  # characters of a name


def printable(name: str) -> str:
    """Return a name from a file for an error message.

    A name that is empty or has other than printable characters is in quotes. Long names are cut.
    """
    return (name if name and name.isprintable() else repr(name))[:_MOST_SHOWN]


def require_file(path: Path) -> None:
    """Check that a path is not a pipe or device, where reading may wait or never end.

    Raises:
        ModelError: the path exists, but is neither a regular file nor a link to one.
    """
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a regular file; download the model again.")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; a pipe or device is refused without waiting for it.

    Raises:
        ModelError: the path is neither a regular file nor a link to one.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path} is not a regular file; download the model again.")
    return open(descriptor, "rb")


class FileBytes:
    """Bytes of an open file, which are read when they are sliced: it may be cut off meanwhile.

    Raises:
        ValueError: the file is empty.
    """

    def __init__(self, stream: BufferedReader) -> None:
        self._file = stream.fileno()
        self._size = os.fstat(self._file).st_size
        if not self._size:
            raise ValueError("it is empty")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        """Return the bytes of a slice without step; fewer if the file has been cut off."""
        begin, end, _ = part.indices(self._size)
        return os.pread(self._file, max(end - begin, 0), begin)


def refuse_lfs_pointer(path: Path) -> None:
    """Check that a file is not a Git-LFS pointer: git without LFS writes a short text instead.

    Raises:
        ModelError: the file is a pointer.
        OSError: the file cannot be read.
    """
    with open_file(path) as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{path} is a Git-LFS pointer, a few lines of text in place of the file. Run "
                f"`git lfs pull` in {path.parent}, or download the model again."
            )


def without_config(folder: Path) -> ModelError:
    """Return the error for a folder without config.json."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return ModelError(
            f"{folder} is empty; name a folder with config.json, *.safetensors and tokenizer.json, "
            "or a model on the hub (org/name)."
        )
    return _of_another_kind(folder) or ModelError(
        f"{folder} has no config.json: a model is a folder with config.json, *.safetensors and "
        "tokenizer.json. Name such a folder, or download the model again."
    )


def without_weights(folder: Path, pattern: str) -> ModelError:
    """Return the error for a folder without weight files.

    Args:
        folder: a folder with config.json.
        pattern: pattern of the names of weight files.
    """
    others = {"mistral": WEIGHTS} if (folder / PARAMS).exists() else {}
    others |= {"safetensors": "*.safetensors", "pt": "pytorch_model*.bin"}
    for load_format, other in others.items():
        if other != pattern and any(folder.glob(other)):
            return ModelError(
                f"{folder} holds {other} files and no {pattern}; set load_format={load_format}."
            )
    return _of_another_kind(folder) or ModelError(
        f"{folder} holds no {pattern} files: the download is incomplete, or the model is published "
        "in another format. Download the model again, or choose one with *.safetensors."
    )


def _of_another_kind(folder: Path) -> ModelError | None:
    """Return the error for an adapter or for GGUF files; None for other folders."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        return ModelError(
            f"{folder} is an adapter{_base_of(adapter)}, not a model; name the folder of its "
            f"model, and give the adapter with enable_lora and lora_modules=NAME={folder}."
        )
    for file in sorted(folder.glob("*.gguf")):
        return ModelError(f"{folder} holds GGUF files; name one of them, such as {file}.")
    return None


def _base_of(adapter: Path) -> str:
    """Return " for MODEL" if an adapter names its model, else ""."""
    try:
        base = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" for {base[:100]}" if isinstance(base, str) and base else ""
