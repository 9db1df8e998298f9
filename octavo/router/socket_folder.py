"""The folder of a router's Unix sockets; what a router that was killed has left is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "octavo-router-"


class SocketFolder:
    """A new folder that only this user can open. While its router lives, it is locked.

    Removes the folders of this user's routers that live no more.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_if_left(folder)
        self.path, self._lock = _make()

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Another router may see it before it is locked, and remove it.
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
