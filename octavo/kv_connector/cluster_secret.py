"""Secret that engines share to trust each other: the key of the cluster or of this user."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

from octavo.config import cache_folder
from octavo.errors import ConfigError

_MIN_CHARS = 32


def cluster_secret(path: str | None) -> bytes:
    """Derive a secret of 32 bytes from a key file.

    Args:
        path: path of the cluster's key file; None: this user's file, which is created if it does
            not exist.

    Raises:
        ConfigError: the file cannot be read, or other users can read it.
    """
    file = Path(path) if path is not None else _own_file()
    try:
        if path is None and not file.exists():
            _make(file)
        mode, text = file.stat().st_mode, file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the key file {file} cannot be read ({error.strerror}).") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"the key file {file} can be read by others; restrict it by `chmod 600`.")
    if len(text) < _MIN_CHARS:
        raise ConfigError(f"the key file {file} has {len(text)} characters, fewer than a secret.")
    return hashlib.sha256(b"octavo kv transfer\0" + text).digest()


def _own_file() -> Path:
    folder = cache_folder()
    if folder is None:
        raise ConfigError("There is no folder for a key of this user; set cluster_key_file.")
    return folder / "p2p.key"


def _make(file: Path) -> None:
    """Create the key file atomically: another process may create it at the same time."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        os.link(new, file)
    new.unlink()
