"""File of copies of blocks that survives its process; only one rank writes it.

The header identifies the layout and the rank, and holds the size. A table with a record for each
slot follows, then the copies. To write a copy, the slot's record is removed first and the new one
is written last: a process that dies in between leaves a slot without a record. After a crash of the
machine, the checksums of the records and of the copies detect the data that did not reach the disk.

The file is read and written by system calls, not mapped: a full disk or a truncated file is then
an error of the call and does not kill the process.
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
_HEADER = struct.Struct("<8s32sQQ")  # magic, identity of the rank's copies, slots, copy bytes
_RECORD = struct.Struct("<QI4x32s")  # number, group, hash
_CHECK_NBYTES = 16
_RECORD_NBYTES = _RECORD.size + _CHECK_NBYTES
_PAGE = 4096


class CopyFile:
    """File of one rank.

    Args:
        path: its path; it is created if it does not exist, and emptied if its header differs.
        layout: layout of a block.
        num_slots: number of slots.

    Raises:
        ConfigError: the file cannot be used, or another process uses it.
    """

    def __init__(self, path: Path, layout: KVLayout, num_slots: int) -> None:
        self._layout, self._num_slots = layout, num_slots
        self._copies = _begin_of_copies(num_slots)
        header = _HEADER.pack(_MAGIC, layout.own_identity, num_slots, layout.copy_nbytes)
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
        """Lock the file, and empty it if its header differs."""
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise _unusable(path, "it is not a regular file of this user")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _unusable(
                path, "another engine uses it; set another folder or engine_id for this one"
            ) from None
        try:
            os.fchmod(self._fd, 0o600)
            size = self._copies + self._num_slots * self._layout.copy_nbytes
            if os.pread(self._fd, len(header), 0) != header or found.st_size != size:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, size)
                os.pwrite(self._fd, header, 0)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error

    def write(
        self, slot: int, copy: memoryview, number: int, group_id: int, block_hash: bytes
    ) -> None:
        """Write a copy to a slot.

        Args:
            slot: the slot.
            copy: [copy_nbytes]
            number: position in the order of eviction; larger is later.
            group_id: KV-cache group of the block, or the number of a state's piece after these.
            block_hash: hash of the block.

        Raises:
            OSError: the file cannot be written; then the slot is empty.
        """
        self.remove(slot)
        _write(self._fd, copy, self._copies + slot * self._layout.copy_nbytes)
        body = _RECORD.pack(number, group_id, block_hash)
        record = body + _check(self._layout, slot, body)
        _write(self._fd, memoryview(record), _PAGE + slot * _RECORD_NBYTES)

    def read(self, slot: int, copy: memoryview) -> None:
        """Read a copy.

        Raises:
            OSError: the file cannot be read.
        """
        at, view = self._copies + slot * self._layout.copy_nbytes, copy
        while view:
            count = os.preadv(self._fd, [view], at)
            if count == 0:
                raise OSError("the file is shorter than it was")
            at, view = at + count, view[count:]

    def remove(self, slot: int) -> None:
        """Remove a slot's record.

        Raises:
            OSError: the file cannot be written.
        """
        _write(self._fd, memoryview(bytes(_RECORD_NBYTES)), _PAGE + slot * _RECORD_NBYTES)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def read_records(path: Path, layout: KVLayout) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (number, slot, group, hash) of each copy in a file, in no order.

    Args:
        path: path of a rank's file; it need not exist.
        layout: layout of that rank.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            magic, identity, num_slots, copy_nbytes = _HEADER.unpack(header)
            size = _begin_of_copies(num_slots) + num_slots * copy_nbytes
            if (magic, identity) != (_MAGIC, layout.own_identity) or size != os.fstat(
                file.fileno()
            ).st_size:
                return
            file.seek(_PAGE)
            table = file.read(num_slots * _RECORD_NBYTES)
    except OSError:
        return
    for slot in range(len(table) // _RECORD_NBYTES):
        record = table[slot * _RECORD_NBYTES : (slot + 1) * _RECORD_NBYTES]
        body, check = record[: _RECORD.size], record[_RECORD.size :]
        if any(check) and check == _check(layout, slot, body):
            number, group_id, block_hash = _RECORD.unpack(body)
            if group_id < layout.num_kinds:
                yield number, slot, group_id, block_hash


def _begin_of_copies(num_slots: int) -> int:
    """Return the offset of the first copy: after the header and the table, in whole pages."""
    return _PAGE + -(-num_slots * _RECORD_NBYTES // _PAGE) * _PAGE


def _check(layout: KVLayout, slot: int, body: bytes) -> bytes:
    """Return the checksum of a record, which depends on the file and the slot."""
    key = layout.own_identity + slot.to_bytes(8, "little")
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
