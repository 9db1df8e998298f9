"""Objects that clients store: in memory, and with --state-dir also on disk."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from octavo.errors import reason_of
from octavo.frontend.request_memory import RequestMemory
from octavo.server.auth import tenant_of
from octavo.server.state_dir import sync_folder, write_file

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_OBJECTS = 16384
# Objects in memory occupy at most this fraction (1/8) of the memory for requests.
_SHARE = 8
MAX_DISK_BYTES = 4 * 2**30
# Bytes of an object's records, in addition to its data.
_RECORD = 512
_DIGEST = 16
_OWNER = re.compile(r"[0-9a-f]{64}|all")
OBJECT_ID = re.compile(r"[a-z]{1,8}_[0-9a-f]{32}")
"""Form of all names of objects, which are also names of files."""
_UNFINISHED = ".unfinished"


class ObjectStore:
    """Objects by API key and name, the most recently used ones within limits.

    If there are too many objects, the API key with the most of them loses those that it has not
    used for the longest time. So a client that stores many cannot remove those of another client.

    Args:
        folder: folder that keeps the objects across restarts; None: they are in memory only.
        memory_bytes: size of the memory for requests.
    """

    def __init__(self, folder: Path | None, memory_bytes: int) -> None:
        self.changing = asyncio.Lock()
        """Lock for reading an object, changing it and storing it again."""
        self._folder = folder
        self._data: dict[tuple[str, str], bytes] = {}
        self._in_memory = _Shelf(memory_bytes // _SHARE, MAX_OBJECTS)
        self._on_disk = _Shelf(MAX_DISK_BYTES, MAX_OBJECTS)
        self._reads: dict[tuple[str, str], object] = {}
        """Newest read of each object that is being read and has not changed since."""
        self._outdated: set[tuple[str, str]] = set()
        """Objects whose file has an earlier state; only the thread of the disk uses it."""
        self._memory: RequestMemory | None = None
        self._writer: ThreadPoolExecutor | None = None
        """Thread that does all work on the disk, in order."""
        if folder is not None:
            self._writer = ThreadPoolExecutor(1, "octavo-objects")
            _find_files(folder, self._on_disk)

    def use_memory(self, memory: RequestMemory) -> None:
        """Count objects in a memory, which drops them from memory if requests need it."""
        first, self._memory = memory.spare, memory

        def spare(nbytes: int) -> None:
            goal = memory.used - nbytes
            first(nbytes)
            for owner, name in self._in_memory.shrink(memory.used - goal):
                self._forget(owner, name)

        memory.spare = spare

    async def put(self, api_key: str | None, name: str, data: bytes) -> None:
        """Store an object; it replaces an earlier one of this name."""
        owner = _owner(api_key)
        self._reads.pop((owner, name), None)
        self._remember(owner, name, data)
        if self._folder is None:
            return
        self._on_disk.put(owner, name, len(data) + _DIGEST)
        too_many = list(self._on_disk.excess())
        await self._work(self._write, self._folder, owner, name, data, too_many)

    async def get(self, api_key: str | None, name: str) -> bytes | None:
        """Return an object; None: the key has no object of this name."""
        owner = _owner(api_key)
        data = self._data.get((owner, name))
        if data is not None:
            self._in_memory.touch(owner, name)
        elif self._folder is not None and self._on_disk.has(owner, name):
            data = await self._read_back(self._folder, owner, name)
        if self._folder is not None:
            self._on_disk.touch(owner, name)
        return data

    async def delete(self, api_key: str | None, name: str) -> bool:
        """Delete an object; return False if the key has no object of this name."""
        owner = _owner(api_key)
        found = (owner, name) in self._data
        self._reads.pop((owner, name), None)
        self._forget(owner, name)
        if self._folder is not None and self._on_disk.has(owner, name):
            found = True
            self._on_disk.remove(owner, name)
            await self._work(_remove, self._folder, [(owner, name)])
        return found

    def _write(
        self, folder: Path, owner: str, name: str, data: bytes, too_many: list[tuple[str, str]]
    ) -> None:
        """Write an object; if that fails, an earlier state of it must not come back."""
        _remove(folder, too_many)
        if (owner, name) in too_many:
            return
        self._outdated.discard((owner, name))
        if not _write_file(folder, owner, name, data) and not _remove(folder, [(owner, name)]):
            self._outdated.add((owner, name))

    def _read(self, folder: Path, owner: str, name: str) -> bytes | None:
        return None if (owner, name) in self._outdated else _read_file(folder, owner, name)

    def close(self) -> None:
        """Finish the work on the disk."""
        if self._writer is not None:
            self._writer.shutdown()

    async def _read_back(self, folder: Path, owner: str, name: str) -> bytes | None:
        """Read an object from the disk; keep it in memory unless it has changed meanwhile."""
        read = self._reads[owner, name] = object()
        try:
            data = await self._work(self._read, folder, owner, name)
        finally:
            is_newest = self._reads.get((owner, name)) is read
            if is_newest:
                del self._reads[owner, name]
        newer = self._data.get((owner, name))
        if newer is not None or not self._on_disk.has(owner, name):
            return newer
        if is_newest and data is None:
            self._on_disk.remove(owner, name)
        elif is_newest and data is not None:
            self._remember(owner, name, data)
        return data

    def _remember(self, owner: str, name: str, data: bytes) -> None:
        self._forget(owner, name)
        self._data[owner, name] = data
        self._in_memory.put(owner, name, len(data) + _RECORD)
        self._count(len(data) + _RECORD)
        for old_owner, old in self._in_memory.excess():
            self._forget(old_owner, old)
        if self._memory is not None:
            self._memory.make_room()

    def _forget(self, owner: str, name: str) -> None:
        """Remove an object from memory."""
        data = self._data.pop((owner, name), None)
        if data is not None:
            self._in_memory.remove(owner, name)
            self._count(-len(data) - _RECORD)

    def _count(self, nbytes: int) -> None:
        if self._memory is not None:
            self._memory.used += nbytes
            self._memory.kept += nbytes

    async def _work(self, function: Callable[..., T], *args: object) -> T:
        """Call a function on the thread of the disk, also if the caller is cancelled meanwhile."""
        work = asyncio.get_running_loop().run_in_executor(self._writer, function, *args)
        return await asyncio.shield(work)


class _Shelf:
    """Sizes of objects by owner and name, within limits."""

    def __init__(self, max_bytes: int, max_objects: int) -> None:
        self._max_bytes = max_bytes
        self._max_objects = max_objects
        self._sizes: dict[str, dict[str, int]] = {}
        """Size by owner and name, the least recently used name first."""
        self._bytes: Counter[str] = Counter()
        self.nbytes = 0
        self.count = 0

    def has(self, owner: str, name: str) -> bool:
        return name in self._sizes.get(owner, ())

    def put(self, owner: str, name: str, size: int) -> None:
        """Add an object as the most recently used one."""
        self.remove(owner, name)
        self._sizes.setdefault(owner, {})[name] = size
        self._bytes[owner] += size
        self.nbytes += size
        self.count += 1

    def touch(self, owner: str, name: str) -> None:
        """Make an object the most recently used one."""
        if self.has(owner, name):
            sizes = self._sizes[owner]
            sizes[name] = sizes.pop(name)

    def remove(self, owner: str, name: str) -> None:
        """Remove an object, if it is there."""
        if not self.has(owner, name):
            return
        sizes = self._sizes[owner]
        size = sizes.pop(name)
        self._bytes[owner] -= size
        self.nbytes -= size
        self.count -= 1
        if not sizes:
            del self._sizes[owner], self._bytes[owner]

    def excess(self) -> Iterator[tuple[str, str]]:
        """Remove objects until all limits hold; yield their owners and names."""
        while self.count > self._max_objects:
            owner = max(self._sizes, key=lambda owner: len(self._sizes[owner]))
            yield self._remove_oldest(owner)
        yield from self.shrink(self.nbytes - self._max_bytes)

    def shrink(self, nbytes: int) -> Iterator[tuple[str, str]]:
        """Remove objects of about `nbytes` bytes; yield their owners and names."""
        goal = self.nbytes - nbytes
        while self.nbytes > max(goal, 0):
            yield self._remove_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def _remove_oldest(self, owner: str) -> tuple[str, str]:
        name = next(iter(self._sizes[owner]))
        self.remove(owner, name)
        return owner, name


def _owner(api_key: str | None) -> str:
    """Return the name of the folder of a key; the name does not reveal the key."""
    return tenant_of(api_key) or "all"


def _find_files(folder: Path, shelf: _Shelf) -> None:
    """Enter the files of earlier servers in a shelf, the oldest first."""
    found: list[tuple[int, str, str, int]] = []
    for owner in os.scandir(folder):
        if not (_OWNER.fullmatch(owner.name) and owner.is_dir(follow_symlinks=False)):
            logger.warning("%s is no folder of stored objects; it is skipped", owner.path)
            continue
        for file in os.scandir(owner.path):
            info = file.stat(follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                logger.warning("%s is not a stored object; it is skipped", file.path)
            elif file.name.endswith(_UNFINISHED):
                os.unlink(file.path)  # its writer was killed
            elif OBJECT_ID.fullmatch(file.name):
                found.append((info.st_mtime_ns, owner.name, file.name, info.st_size))
            else:
                logger.warning("%s is not a stored object; it is skipped", file.path)
    for _, owner_name, name, size in sorted(found):
        shelf.put(owner_name, name, size)
    _remove(folder, list(shelf.excess()))


def _write_file(folder: Path, owner: str, name: str, data: bytes) -> bool:
    """Write a file; return False, with an error in the log, if that fails."""
    file = folder / owner / name
    try:
        if not file.parent.exists():
            file.parent.mkdir(0o700)
            sync_folder(folder)
        write_file(file, hashlib.blake2b(data, digest_size=_DIGEST).digest() + data)
    except OSError as error:
        logger.error("%s cannot be written, so a restart will lose it: %s", file, reason_of(error))
        return False
    return True


def _read_file(folder: Path, owner: str, name: str) -> bytes | None:
    """Return the data of a file; None, with a warning, if it is damaged or missing."""
    file = folder / owner / name
    try:
        content = file.read_bytes()
    except OSError as error:
        logger.warning("%s cannot be read and is skipped: %s", file, reason_of(error))
        return None
    data = content[_DIGEST:]
    if hashlib.blake2b(data, digest_size=_DIGEST).digest() != content[:_DIGEST]:
        logger.warning("%s is damaged and is skipped", file)
        return None
    return data


def _remove(folder: Path, names: list[tuple[str, str]]) -> bool:
    """Remove files; return False, with an error in the log, if one of them stays."""
    removed = True
    for owner, name in names:
        file = folder / owner / name
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            logger.error("%s cannot be removed: %s", file, reason_of(error))
            removed = False
    return removed
