"""Folder of a router's Unix sockets; folders of killed routers are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "octavo-router-"


class SocketFolder:
    """New folder that only this user can open. It is locked while its router lives.

    Construction removes the folders of this user's dead routers.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_if_left(folder)
        self.path, self._lock = _make()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Another router may remove it before it is locked.
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
