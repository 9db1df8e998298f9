"""Folder of copies of blocks that many engines read and write, with a file for each copy.

Path: `<folder>/<layout>/<division>/<first byte of the hash>/<group>-<hash>.<rank>`. `layout` is the
identity of the model and its form; `division` names the division of the model among processes. So
an engine never reads another model's blocks, and finds all parts of a block that engines with
another division wrote. A file is written under a temporary name, synced and renamed: readers find
only complete files. The checksums of the header and of the copy detect later damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from octavo.errors import ConfigError, reason_of
from octavo.kv_connector.copy_cache import Key
from octavo.kv_connector.layout import KVLayout, KVPart

_MAGIC = b"octavosh"
_HEADER_NBYTES = 4096  # a copy begins at a page
_PREFIX = struct.Struct("<8s16sI")  # magic, checksum of what follows, bytes of the description
_NEW = ".new-"
# Seconds after which a file that was never renamed is removed.
_STALE_SECONDS = 3600.0
# Seconds of writing after which the folder is measured again. If it is too large, the oldest files
# are removed until the kept share of the maximum remains.
_LOOK_SECONDS = 30.0
_KEPT_SHARE = 0.9
# Seconds after which a file's time of use is updated.
_USE_SECONDS = 60.0


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    identity: bytes
    group_id: int
    block_hash: bytes
    part: KVPart


class SharedFolder:
    """Shared folder, for one rank.

    Args:
        path: path of the folder; it is created if it does not exist.
        layout: layout of a block.
        division: division of the model among processes: `<ranks>.<anything>`.
        max_bytes: maximum size of all files of all models; the least recently used files are
            removed first.

    Raises:
        ConfigError: the folder cannot be used, or other users can write to it.
    """

    def __init__(self, path: Path, layout: KVLayout, division: str, max_bytes: int) -> None:
        self._root, self._layout, self._max_bytes = path, layout, max_bytes
        self.division = division
        self._models = path / layout.identity.hex()[:32]
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
        except OSError as error:
            raise _unusable(path, reason_of(error)) from error
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable(path, "it is not a folder")
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _unusable(path, "other users can write to it, and so could make answers wrong")
        self._lock = threading.Lock()
        """Lock of `_size` and `_looked`."""
        self._size: int | None = None
        self._looked = 0.0

    def find(self, group_id: int, block_hash: bytes) -> str | None:
        """Return a division whose files hold all of a block; None if no division does."""
        for division in self._divisions():
            ranks = range(int(division.partition(".")[0]))
            if all(self._file(division, r, group_id, block_hash).exists() for r in ranks):
                return division
        return None

    def _divisions(self) -> Iterator[str]:
        """Yield this engine's division, then the others."""
        yield self.division
        with contextlib.suppress(OSError):
            for name in os.listdir(self._models):
                ranks, dot, _ = name.partition(".")
                if name != self.division and dot and ranks.isdecimal() and 0 < int(ranks) < 4096:
                    yield name

    def _file(self, division: str, rank: int, group_id: int, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._models / division / name[:2] / f"{group_id}-{name}.{rank}"

    def write(self, group_id: int, block_hash: bytes, copy: memoryview) -> None:
        """Write this rank's copy of a block.

        Raises:
            OSError: the file cannot be written; then no file remains.
        """
        path = self._file(self.division, self._layout.rank, group_id, block_hash)
        header = _Header(self._layout.identity, group_id, block_hash, self._layout.part)
        new = path.with_name(f"{_NEW}{secrets.token_hex(8)}")
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            raise FileNotFoundError(2, "the folder was removed", str(path.parent))
        try:
            try:
                for data in (memoryview(_pack(header)), copy):
                    while data:
                        data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            new.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        self._note_written(_HEADER_NBYTES + len(copy))

    def open(self, division: str, rank: int, group_id: int, block_hash: bytes) -> SharedCopy:
        """Open a rank's copy of a block.

        Raises:
            OSError: the file does not exist any more, or has unexpected contents.
        """
        path = self._file(division, rank, group_id, block_hash)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            header = _unpack(os.pread(fd, _HEADER_NBYTES, 0))
            wanted = self._layout.identity, group_id, block_hash
            if (header.identity, header.group_id, header.block_hash) != wanted:
                raise OSError(f"{path} holds another block")
            if found.st_size != _HEADER_NBYTES + header.part.copy_nbytes:
                raise OSError(f"{path} has {found.st_size} bytes, which does not match its header")
            if time.time() - found.st_mtime > _USE_SECONDS:
                with contextlib.suppress(OSError):  # read-only access
                    os.utime(fd)
        except BaseException:
            os.close(fd)
            raise
        return SharedCopy(fd, header.part)

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove all files of blocks."""
        for division in self._divisions():
            for rank in range(int(division.partition(".")[0])):
                for key in keys:
                    self.remove(division, rank, *key)

    def remove(self, division: str, rank: int, group_id: int, block_hash: bytes) -> None:
        """Remove a file with wrong contents, so that it is written again."""
        with contextlib.suppress(OSError):
            self._file(division, rank, group_id, block_hash).unlink()

    def _note_written(self, nbytes: int) -> None:
        """Count written bytes; keep the folder within its size."""
        with self._lock:
            if self._size is not None:
                self._size += nbytes
            now = time.monotonic()
            full = self._size is None or self._size > self._max_bytes
            if not full and now - self._looked < _LOOK_SECONDS:
                return
            self._looked = now
            self._size = self._make_room()

    def _make_room(self) -> int:
        """Remove the least recently used files if the folder is too large; return its size."""
        found: list[tuple[float, int, str]] = []
        stale = time.time() - _STALE_SECONDS
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # another process was faster
                    status = os.lstat(path)
                    if name.startswith(_NEW) and status.st_mtime < stale:
                        os.unlink(path)
                    else:
                        found.append((status.st_mtime, status.st_size, path))
        size = sum(nbytes for _, nbytes, _ in found)
        if size <= self._max_bytes:
            return size
        for _, nbytes, path in sorted(found):
            if size <= self._max_bytes * _KEPT_SHARE:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            size -= nbytes
        return size


class SharedCopy:
    """Open file of the folder.

    Args:
        fd: file descriptor, which is closed on exit.
        part: part of the block that is in the copy.
    """

    def __init__(self, fd: int, part: KVPart) -> None:
        self._fd = fd
        self.part = part

    def read(self, copy: memoryview) -> None:
        """Read the copy.

        Args:
            copy: [part.copy_nbytes]

        Raises:
            OSError: the file cannot be read.
        """
        at, left = _HEADER_NBYTES, copy
        while left:
            count = os.preadv(self._fd, [left], at)
            if count == 0:
                raise OSError("the file is shorter than it was")
            at, left = at + count, left[count:]

    def __enter__(self) -> SharedCopy:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _pack(header: _Header) -> bytes:
    text = msgspec.json.encode(header)
    if _PREFIX.size + len(text) > _HEADER_NBYTES:
        raise OSError("the model has too many layers for a file's header")
    data = _PREFIX.pack(_MAGIC, _check(text), len(text)) + text
    return data.ljust(_HEADER_NBYTES, b"\0")


def _unpack(data: bytes) -> _Header:
    """Parse a header.

    Raises:
        OSError: the data is not a valid header.
    """
    if len(data) == _HEADER_NBYTES:
        magic, check, length = _PREFIX.unpack_from(data)
        text = data[_PREFIX.size : _PREFIX.size + length]
        if magic == _MAGIC and check == _check(text):
            return msgspec.json.decode(text, type=_Header)
    raise OSError("the file has no header of a block")


def _check(text: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + text).digest()[:16]


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"kv_transfer_config: the folder {path} cannot be used: {reason}. Change "
        "shared_storage_path in kv_connector_extra_config."
    )
