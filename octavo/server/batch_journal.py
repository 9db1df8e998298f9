"""Journal of a batch: the answers to its lines, on disk in the order in which they were made.

Each record is one line: the number of the batch's line, 1 for an answer or 0 for an error, the
CRC-32 of the rest, and the JSON for the output file. After a crash the last record may be
incomplete. It is then removed. A damaged record is skipped. In both cases the batch's line is
answered again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import zlib
from pathlib import Path
from typing import BinaryIO

from octavo.server.state_dir import sync_folder

logger = logging.getLogger(__name__)

_RECORD = re.compile(rb"(\d{1,9}) ([01]) ([0-9a-f]{8}) (?=\{)")
_PIECE = 2**20


class Journal:
    """Open journal.

    Args:
        path: file, created if it is missing.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[int, tuple[bool, int, int]] = {}
        """By line: True for an answer, and begin and end of its JSON in the file."""
        self.nbytes = 0
        self._pending: list[tuple[int, bool, bytes]] = []
        self._lock = asyncio.Lock()
        self._failure: OSError | None = None
        self._stream: BinaryIO = path.open("ab")
        try:
            path.chmod(0o600)
            self._read()
            self._stream.truncate(self.nbytes)
            sync_folder(path.parent)
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> None:
        damaged = 0
        with open(self.path, "rb") as records:
            for record in records:
                if not record.endswith(b"\n"):
                    damaged += 1
                    break
                begin = self.nbytes
                self.nbytes += len(record)
                found = _RECORD.match(record)
                if found is not None:
                    number, good = int(found[1]), found[2] == b"1"
                    if _record(number, good, record[found.end() : -1]) == record:
                        self.places[number] = good, begin + found.end(), self.nbytes
                        continue
                damaged += 1
        if damaged:
            logger.warning(
                "%s: %d records are incomplete or damaged; their lines are answered again",
                self.path,
                damaged,
            )

    @property
    def num_good(self) -> int:
        """Number of answers that are no errors."""
        return sum(good for good, _, _ in self.places.values())

    async def append(self, number: int, good: bool, data: bytes) -> None:
        """Append an answer; return when it survives a crash. Appends at one time share a sync.

        Args:
            number: number of the line.
            good: False for an error.
            data: a JSON object, for the output file.

        Raises:
            OSError: the answer cannot be written; the journal must be opened again.
        """
        self._pending.append((number, good, data))
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            pending, self._pending = self._pending, []
            if not pending:
                return
            records, end = [], self.nbytes
            for number, good, data in pending:
                record = _record(number, good, data)
                records.append(record)
                end += len(record)
                self.places[number] = good, end - len(data) - 1, end
            try:
                await asyncio.to_thread(self._write, b"".join(records))
            except OSError as error:
                self._failure = error
                raise
            self.nbytes = end

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def write_to(self, target: BinaryIO, good: bool) -> None:
        """Write the answers, or the errors, in the order of the lines, on any thread.

        Args:
            target: output file or error file.
            good: True for the answers.
        """
        with open(self.path, "rb") as records:
            for number in sorted(self.places):
                is_good, begin, end = self.places[number]
                if is_good != good:
                    continue
                records.seek(begin)
                while begin < end:
                    piece = records.read(min(_PIECE, end - begin))
                    target.write(piece)
                    begin += len(piece)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _record(number: int, good: bool, data: bytes) -> bytes:
    checksum = zlib.crc32(data, zlib.crc32(b"%d %d" % (number, good)))
    return b"%d %d %08x %b\n" % (number, good, checksum, data)
