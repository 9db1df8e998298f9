"""GGUF files on the Hugging Face hub without the data of their tensors."""

from __future__ import annotations

import fnmatch
import functools
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from octavo.checkpoints.gguf.file import is_factors
from octavo.checkpoints.gguf.header import GGUFHeader, MissingBytesError

_FIRST_NBYTES = 2**22
_MOST_NBYTES = 2**28
"""First and last length of a file's beginning that is read to find the header in it."""
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of this process, which are deleted at its end."""


@functools.cache
def fetch_headers(repo_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return a folder with the GGUF files that match a pattern, without the tensors' data.

    Only the header of each file is downloaded, by requests for ranges of bytes. The rest is a hole
    that takes no room on the disk. Factors that belong to the description are 1: neither memory nor
    time depends on them.

    Raises:
        ModelError: a file is not GGUF, or its header is damaged.
        Exception: errors of the hub client.
    """
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.hf_api import RepoFile

    _folders.append(tempfile.TemporaryDirectory(prefix="octavo-"))
    folder = Path(_folders[-1].name)
    hub = HfFileSystem(skip_instance_cache=True)
    for entry in HfApi().list_repo_tree(repo_id, revision=revision):
        name = entry.path
        if not isinstance(entry, RepoFile) or "/" in name or not _matches(name, patterns):
            continue
        place = f"{repo_id}@{revision}/{name}" if revision else f"{repo_id}/{name}"
        with hub.open(place, block_size=_FIRST_NBYTES, cache_type="none") as file:
            _copy_header(file, entry.size, folder / name)
    return folder


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _copy_header(source: BinaryIO, nbytes: int, path: Path) -> None:
    """Write a file of `nbytes` whose header is that of the source."""
    with path.open("wb") as target:
        target.truncate(nbytes)
        known, wanted = 0, min(nbytes, _FIRST_NBYTES)
        while True:
            target.write(source.read(wanted - known))
            target.flush()
            known = wanted
            try:
                header = GGUFHeader(path, known)
                break
            except MissingBytesError:
                wanted = min(nbytes, 2 * known)
                if wanted > _MOST_NBYTES:
                    raise
        for tensor in header.tensors.values():
            if is_factors(tensor):
                target.seek(tensor.begin)
                target.write(np.ones(tensor.nbytes // 4, np.float32).tobytes())
