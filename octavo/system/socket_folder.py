"""A folder for Unix sockets; the folders that killed processes have left are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class SocketFolder:
    """A new folder that only this user can open, locked as long as its process lives.

    Removes the folders with the same prefix that processes of this user have left.

    Args:
        prefix: what its name begins with; all folders with it are of this class.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(folder)
        self.path, self._lock = _make(prefix)

    def close(self) -> None:
        """Remove it; once only."""
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
    with contextlib.suppress(OSError):  # another user's, or removed meanwhile
        if path.lstat().st_uid != os.getuid():
            return
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
