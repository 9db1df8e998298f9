"""Images of blocks in a file that survives its process: a rank's, written by that rank alone.

A header says of which layout, rank and size they are; a table has a record for each place; the
images follow. Whoever writes an image takes its record back before, and puts the new one there
afterwards: a process that dies in between leaves a place without a record. What a machine that
crashes leaves is told by the records' checksums and those of the images themselves.

It is read and written by calls, not mapped: a disk that is full, or a file that somebody cuts
short, is then an error of that call, and not the end of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import ConfigError
from octavo.kv_connector.layout import KVLayout

_MAGIC = b"octavokv"
_HEADER = struct.Struct("<8s32sIIQQ")  # magic, identity, rank, world size, slots, image bytes
_RECORD = struct.Struct("<QI4x32s")  # number, group, hash
_CHECK_NBYTES = 16
_RECORD_NBYTES = _RECORD.size + _CHECK_NBYTES
_PAGE = 4096


class ImageFile:
    """The file of one rank.

    Args:
        path: its path; it is made if it is not there, and emptied if it is of something else.
        layout: what images are made of.
        num_slots: places.

    Raises:
        ConfigError: it cannot be used, or another process does.
    """

    def __init__(self, path: Path, layout: KVLayout, num_slots: int) -> None:
        self._layout, self._num_slots = layout, num_slots
        table = num_slots * _RECORD_NBYTES
        self._images = _PAGE + -(-table // _PAGE) * _PAGE
        header = _HEADER.pack(
            *(_MAGIC, layout.identity, layout.rank, layout.world_size),
            *(num_slots, layout.image_nbytes),
        )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        try:
            self._take(path, header)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path, header: bytes) -> None:
        """Makes the file this process' own, and empties it if it holds something else."""
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise _unusable(path, "it is not a regular file of this user")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _unusable(
                path, "another engine uses it; give this one another folder or engine_id"
            ) from None
        try:
            os.fchmod(self._fd, 0o600)
            size = self._images + self._num_slots * self._layout.image_nbytes
            if os.pread(self._fd, len(header), 0) != header or found.st_size != size:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, size)
                os.pwrite(self._fd, header, 0)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error

    def write(
        self, slot: int, image: memoryview, number: int, group_id: int, block_hash: bytes
    ) -> None:
        """Puts an image in a place.

        Args:
            slot: the place.
            image: [image_nbytes]
            number: the larger, the later it goes.
            group_id: its KV-cache group.
            block_hash: its block's.

        Raises:
            OSError: it cannot be written; the place is empty then.
        """
        self.remove(slot)
        _write(self._fd, image, self._images + slot * self._layout.image_nbytes)
        body = _RECORD.pack(number, group_id, block_hash)
        record = body + _check(self._layout, slot, body)
        _write(self._fd, memoryview(record), _PAGE + slot * _RECORD_NBYTES)

    def read(self, slot: int, image: memoryview) -> None:
        """Reads an image; what is behind the file's end reads as nothing.

        Raises:
            OSError: it cannot be read.
        """
        at, view = self._images + slot * self._layout.image_nbytes, image
        while view:
            count = os.preadv(self._fd, [view], at)
            if count == 0:
                raise OSError("the file is shorter than it was")
            at, view = at + count, view[count:]

    def remove(self, slot: int) -> None:
        """Takes a place's record back.

        Raises:
            OSError: it cannot be written.
        """
        _write(self._fd, memoryview(bytes(_RECORD_NBYTES)), _PAGE + slot * _RECORD_NBYTES)

    def close(self) -> None:
        """Lets go of the file. May be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def read_records(path: Path, layout: KVLayout) -> Iterator[tuple[int, int, int, bytes]]:
    """(number, slot, group, hash) of each image in a file, in no order; none if there is no file.

    Args:
        path: of a rank's file, which its process has opened before.
        layout: that rank's.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            num_slots = _HEADER.unpack(header)[4]
            file.seek(_PAGE)
            table = file.read(num_slots * _RECORD_NBYTES)
    except OSError:
        return
    for slot in range(len(table) // _RECORD_NBYTES):
        record = table[slot * _RECORD_NBYTES : (slot + 1) * _RECORD_NBYTES]
        body, check = record[: _RECORD.size], record[_RECORD.size :]
        if any(check) and check == _check(layout, slot, body):
            number, group_id, block_hash = _RECORD.unpack(body)
            if group_id < len(layout.groups):
                yield number, slot, group_id, block_hash


def _check(layout: KVLayout, slot: int, body: bytes) -> bytes:
    """A checksum of a record, which is another one in another file or place."""
    key = layout.identity + layout.rank.to_bytes(4, "little") + slot.to_bytes(8, "little")
    return hashlib.sha256(key + body).digest()[:_CHECK_NBYTES]


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        offset, data = offset + count, data[count:]


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"kv_transfer_config: the file {path} cannot be used: {reason}. Change file_path in "
        "kv_connector_extra_config."
    )
