"""Media with a `uuid` that several front ends of a server share.

They are files in a private folder of the run, so a front end knows the media of the others as soon
as one has kept them, and a front end that is replaced finds them. The folder has the rules of
`MediaCache`. Its files are data of `msgspec`, and only this user can open the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from octavo.frontend.media_cache import MediaKey
from octavo.multimodal.items import Item
from octavo.scheduler.fairness import Tenant

logger = logging.getLogger(__name__)

# Bytes that a file counts besides its content; they bound the number of files.
_ENTRY = 2**16
_LOCK, _NEW = "lock", "new"
_decoder = msgspec.msgpack.Decoder(Item)


class SharedMedia:
    """Media of several processes within a number of bytes; threads may share it.

    If there is no room, the tenant that holds most bytes gives up the item that it has not used for
    the longest time.

    Args:
        folder: an existing folder, which has no other files.
        max_nbytes: most bytes of all items; 0: it keeps none.
    """

    def __init__(self, folder: Path, max_nbytes: int) -> None:
        self._folder, self._max_nbytes = folder, max_nbytes

    def get(self, key: MediaKey) -> Item | None:
        """Return an item; None: it is not kept."""
        name = _digest(key)
        try:
            with self._lock(fcntl.LOCK_SH):
                path = next((path for path in self._files() if path.name.startswith(name)), None)
                if path is None:
                    return None
                os.utime(path)
                data = path.read_bytes()
        except OSError as error:
            logger.warning("a picture, sound or video with a uuid cannot be read: %s", error)
            return None
        return _decoder.decode(data)

    def put(self, key: MediaKey, item: Item, nbytes: int, tenant: Tenant) -> None:
        """Keep an item in place of the one with this key; one that never fits is not kept.

        Args:
            key: its key.
            item: the item.
            nbytes: its bytes.
            tenant: sender of the item.
        """
        name = _digest(key)
        most = self._max_nbytes - _ENTRY
        data = msgspec.msgpack.encode(item) if nbytes <= most else b""
        fits = 0 < len(data) <= most  # it has more bytes than those of the item's arrays
        try:
            with self._lock():
                old = {path for path in self._files() if path.name.startswith(name)}
                if fits:
                    self._make_room(most - len(data), old)
                    kept = self._folder / f"{name}-{_digest(tenant)[:16]}"
                    new = self._folder / _NEW
                    try:
                        new.write_bytes(data)
                        new.rename(kept)
                    except OSError:
                        new.unlink(missing_ok=True)  # on a full disk it would take the rest
                        raise
                    old.discard(kept)
                for path in old:
                    path.unlink()
        except OSError as error:
            logger.warning("a picture, sound or video cannot be kept by its uuid: %s", error)

    def clear(self) -> None:
        """Give up all items."""
        with self._lock():
            for path in self._files():
                path.unlink()

    def _make_room(self, nbytes: int, replaced: set[Path]) -> None:
        """Give up items until the others, without those to be replaced, have at most `nbytes`."""
        held: defaultdict[str, list[tuple[int, int, Path]]] = defaultdict(list)
        for path in set(self._files()) - replaced:
            stat = path.stat()
            held[path.name.partition("-")[2]].append((stat.st_mtime_ns, stat.st_size, path))
        sums = {tenant: sum(size + _ENTRY for _, size, _ in own) for tenant, own in held.items()}
        for own in held.values():
            own.sort(reverse=True)
        while sum(sums.values()) > nbytes:
            largest = max(sums, key=sums.__getitem__)
            _, size, path = held[largest].pop()
            sums[largest] -= size + _ENTRY
            path.unlink()

    def _files(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if "-" in path.name)

    @contextmanager
    def _lock(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Exclude all others, or with LOCK_SH all changes; also those of other threads."""
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind)
            yield
        finally:
            os.close(lock)


def _digest(value: MediaKey | Tenant) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()
