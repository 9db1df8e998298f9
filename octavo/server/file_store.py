"""Files that clients upload and that batches write, on disk; see `files.py` for their routes.

Each file has two files in the folder: `ID.bin` with its bytes and `ID.json` with its description.
The description is written last, so that a file without one was never complete. A name that a client
gives is never a part of a path.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from octavo.errors import NotFoundError, RequestError, reason_of
from octavo.frontend.request_memory import leaves_room
from octavo.server.errors import show
from octavo.server.state_dir import write_file

logger = logging.getLogger(__name__)

MAX_FILES = 4096
# Most bytes of all files together, in multiples of the most bytes of one file.
_MAX_TOTAL = 50
# Most expired files that one request deletes, so that it does not take long.
_MOST_DROPPED = 64
_ID = re.compile(r"file-[0-9a-f]{32}")

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
"""Purposes of uploads, as OpenAI defines them; batches need "batch"."""


class StorageError(RequestError):
    """Disk that cannot hold a client's data; the same request may work later."""

    status = 507
    type = "server_error"

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"The data cannot be stored: {reason_of(error)}; delete files, or tell the server's "
            "operator.",
            None,
            "storage_failed",
        )


class FileTooLargeError(RequestError):
    """File with more bytes than the server accepts."""

    status = 413

    def __init__(self, limit: int, fix: str = "see --max-file-bytes") -> None:
        super().__init__(
            f"The file is larger than {limit} bytes, the most this server accepts; {fix}.",
            "file",
            "file_too_large",
        )


class StoredFile(msgspec.Struct, frozen=True):
    """Description of a file."""

    id: str
    owner: str | None
    """Tenant of the API key that uploaded it; None: a client without a key."""
    filename: str
    purpose: str
    bytes: int
    created_at: int
    """Second since 1970."""
    expires_at: int | None = None


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{uuid.uuid4().hex}"


class FileStore:
    """Files of all clients; each client sees only its own.

    Args:
        folder: folder for the files; unfinished ones of an earlier server are removed.
        max_file_bytes: most bytes of a file.
        several_owners: True if each owner must leave room for the others.
    """

    def __init__(self, folder: Path, max_file_bytes: int, *, several_owners: bool) -> None:
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.in_use: Callable[[str], bool] = lambda file_id: False
        """Returns True if a batch still needs the file."""
        self._max_total = _MAX_TOTAL * max_file_bytes
        self._several_owners = several_owners
        self._files: dict[str, StoredFile] = {}
        self._num_bytes: Counter[str | None] = Counter()
        """Bytes of the complete and the unfinished files of each owner."""
        self._num_files: Counter[str | None] = Counter()
        self._load()

    def _load(self) -> None:
        found: list[tuple[int, StoredFile]] = []
        for path in self.folder.glob("*.json"):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                if file.id == path.stem and self.path(file.id).stat().st_size == file.bytes:
                    found.append((path.stat().st_mtime_ns, file))
                    continue
            except (OSError, msgspec.MsgspecError):
                pass
            logger.warning("%s does not describe a complete file, and is removed", path)
            path.unlink()
        for _, file in sorted(found, key=itemgetter(0)):
            self.add(file)
        for path in self.folder.iterdir():
            if path.suffix != ".json" and path.stem not in self._files:
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Return the path of the bytes of a file; the id is one of this store."""
        return self.folder / f"{file_id}.bin"

    def find(self, owner: str | None, file_id: str, param: str = "file_id") -> StoredFile:
        """Return an owner's file.

        Raises:
            NotFoundError: the owner has no such file; another owner may have it.
        """
        self._drop_expired()
        found = self._files.get(file_id) if _ID.fullmatch(file_id) else None
        if found is None or found.owner != owner:
            raise NotFoundError(
                f"There is no file {show(file_id)}; GET /v1/files lists those of this API key.",
                param,
                "file_not_found",
            )
        return found

    def files(self, owner: str | None) -> list[StoredFile]:
        """Return an owner's files, the oldest first."""
        self._drop_expired()
        return [file for file in self._files.values() if file.owner == owner]

    async def delete(self, file: StoredFile) -> None:
        """Delete a file.

        Raises:
            RequestError: a batch needs it.
            StorageError: it cannot be deleted.
        """
        if self.in_use(file.id):
            error = RequestError(
                f"A batch reads {file.id}; cancel the batch or wait for its end.",
                "file_id",
                "file_in_use",
            )
            error.status = 409
            raise error
        self._forget(file)
        try:
            await asyncio.to_thread(self._unlink, file)
        except OSError as failed:
            self.add(file)
            raise StorageError(failed) from None

    def _unlink(self, file: StoredFile) -> None:
        (self.folder / f"{file.id}.json").unlink(missing_ok=True)
        self.path(file.id).unlink(missing_ok=True)

    def _forget(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._num_files[file.owner] -= 1
        self._num_bytes[file.owner] -= file.bytes

    def _drop_expired(self) -> None:
        now = time.time()
        expired = (f for f in self._files.values() if f.expires_at and f.expires_at <= now)
        unused = (file for file in expired if not self.in_use(file.id))
        for file in list(islice(unused, _MOST_DROPPED)):
            self._forget(file)
            try:
                self._unlink(file)
            except OSError as error:
                logger.error("%s has expired and cannot be deleted: %s", file.id, error)

    def check_room(self, owner: str | None, nbytes: int) -> None:
        """Check that there is room for bytes that an owner is about to write.

        Raises:
            RequestError: the owner, or all owners together, have too many bytes.
        """
        self._check(self._num_bytes, owner, nbytes, self._max_total, "bytes of files")

    def count(self, owner: str | None, nbytes: int) -> None:
        """Count bytes that an owner writes."""
        self._num_bytes[owner] += nbytes

    def give_back(self, owner: str | None, nbytes: int) -> None:
        """Stop counting bytes that are not written after all."""
        self._num_bytes[owner] -= nbytes

    def _check(
        self, held: Counter[str | None], owner: str | None, more: int, limit: int, what: str
    ) -> None:
        free = limit - held.total()
        mine = held[owner] if self._several_owners else 0
        if not leaves_room(mine, more, free):
            whose = "This API key has" if more <= free else "All clients together have"
            has = held[owner] if more <= free else held.total()
            raise RequestError(
                f"{whose} {has} {what}, and the server holds at most {limit}; delete files that "
                "are no longer needed.",
                "file",
                "storage_limit_exceeded",
            )

    def begin(self, owner: str | None) -> FileWriter:
        """Begin a file of an owner.

        Raises:
            RequestError: there are too many files.
            StorageError: the file cannot be created.
        """
        self._drop_expired()
        self._check(self._num_files, owner, 1, MAX_FILES, "files")
        return FileWriter(self, owner, new_file_id())

    def describe(self, file: StoredFile) -> None:
        """Write the description of a file whose bytes are at `path(file.id)`, on any thread.

        Raises:
            OSError: the description cannot be written.
        """
        write_file(self.folder / f"{file.id}.json", msgspec.json.encode(file))

    def add(self, file: StoredFile) -> None:
        """Show a file that is complete on disk to its owner."""
        self._files[file.id] = file
        self._num_files[file.owner] += 1
        self._num_bytes[file.owner] += file.bytes

    def replace(self, file: StoredFile) -> None:
        """Show a file that is complete on disk, in place of an older one with its id."""
        if (old := self._files.get(file.id)) is not None:
            self._forget(old)
        self.add(file)


class FileWriter:
    """File that is being written; a `finish` that succeeds or `discard` must follow.

    Args:
        store: the store.
        owner: owner of the file.
        file_id: id of the file.

    Raises:
        StorageError: the file cannot be created.
    """

    def __init__(self, store: FileStore, owner: str | None, file_id: str) -> None:
        self._store = store
        self._owner = owner
        self.id = file_id
        self.nbytes = 0
        self._taken = 0
        try:
            self._stream: BinaryIO = store.path(file_id).open("xb")
            store.path(file_id).chmod(0o600)
        except OSError as error:
            raise StorageError(error) from None

    @property
    def max_file_bytes(self) -> int:
        """Most bytes of a file."""
        return self._store.max_file_bytes

    def too_large(self) -> RequestError:
        """Return the error of a larger file."""
        return FileTooLargeError(self.max_file_bytes)

    def take(self, nbytes: int) -> None:
        """Count bytes that may be written next.

        Raises:
            RequestError: there is no room for them.
        """
        self._store.check_room(self._owner, nbytes)
        self._store.count(self._owner, nbytes)
        self._taken += nbytes

    def write(self, data: bytes) -> None:
        """Write the next bytes, on any thread.

        Raises:
            FileTooLargeError: the file becomes too large.
            StorageError: the bytes cannot be written.
        """
        self.nbytes += len(data)
        if self.nbytes > self.max_file_bytes:
            raise self.too_large()
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            raise StorageError(error) from None

    async def finish(self, filename: str, purpose: str, expires_after: int | None) -> StoredFile:
        """Complete the file; return its description.

        Raises:
            StorageError: it cannot be written.
        """
        now = int(time.time())
        file = StoredFile(
            self.id,
            self._owner,
            filename,
            purpose,
            self.nbytes,
            now,
            None if expires_after is None else now + expires_after,
        )
        try:
            await asyncio.to_thread(self._complete, file)
        except OSError as error:
            raise StorageError(error) from None
        self._store.give_back(self._owner, self._taken)
        self._taken = 0
        self._store.add(file)
        return file

    def _complete(self, file: StoredFile) -> None:
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._store.describe(file)

    async def discard(self) -> None:
        """Remove the file."""
        self._store.give_back(self._owner, self._taken)
        self._taken = 0
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        self._stream.close()
        self._store.path(self.id).unlink(missing_ok=True)
