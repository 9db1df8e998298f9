"""Folder of Unix sockets; folders of killed processes are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class SocketFolder:
    """New folder that only this user can open. It is locked while its process lives.

    Construction removes the folders with the same prefix that dead processes of this user left.

    Args:
        prefix: prefix of the folder's name, the same for all folders of this kind.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, prefix: str) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(folder)
        self.path, self._lock = _make(prefix)

    def close(self) -> None:
        """Remove the folder. Call this once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make(prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        # Another process may see it before it is locked, and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = _open(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_if_left(path: Path) -> None:
    with contextlib.suppress(OSError):  # it may be another user's, or removed meanwhile
        if path.lstat().st_uid != os.getuid():
            return
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
