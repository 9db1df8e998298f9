"""Folder of --state-dir: data of clients that survives a restart of the server."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from octavo.errors import ConfigError, reason_of
from octavo.system.private_folder import check_private_folder


class StateDir:
    """Folder that only one server uses at a time.

    Args:
        path: the folder, created if it is missing.

    Raises:
        ConfigError: the folder cannot be used, other users can write in it, or another server
            uses it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).resolve()
        try:
            _make_private(self._path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock = os.open(self._path / "lock", flags, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                raise
        except BlockingIOError:
            raise ConfigError(
                f"state_dir={path!r} is in use by another server; name another folder."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"state_dir={path!r} cannot be used: {reason_of(error)}; name another folder."
            ) from None

    def subfolder(self, name: str) -> Path:
        """Return a folder for one kind of data, created if it is missing.

        Args:
            name: constant of the code, never text of a client.

        Raises:
            ConfigError: the folder cannot be used, or other users can write in it.
        """
        folder = self._path / name
        try:
            _make_private(folder)
            sync_folder(self._path)
        except OSError as error:
            raise ConfigError(f"state_dir: {folder} cannot be used: {reason_of(error)}.") from None
        return folder

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)


def write_file(file: Path, data: bytes) -> None:
    """Write a file that only this user can read; return when it survives a crash.

    A reader finds the old or the new content, also after a crash.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(".unfinished", dir=file.parent)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder survive a crash.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_private(folder: Path) -> None:
    folder.mkdir(0o700, parents=True, exist_ok=True)
    check_private_folder(folder)
