"""Output of a conversion that can be interrupted at any time and continued.

The output grows in `OUT.unfinished`, a folder next to OUT. Its file of tensors is only appended to,
piece by piece, so its length tells which pieces are complete. When everything is written, it gets
its final name; before that, there is nothing of that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.plan.memory_plan import MIB
from octavo.system.device import num_cpus

_KEY, _LOCK = "conversion.key", "conversion.lock"


@dataclass(frozen=True)
class Piece:
    """Successive bytes of a file of tensors."""

    nbytes: int
    make: Callable[[], bytes]
    """Function that returns the bytes; another thread may call it."""


@dataclass(frozen=True)
class TensorFile:
    """File of tensors: its beginning, and pieces that are computed when they are written."""

    name: str
    head: bytes
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(piece.nbytes for piece in self.pieces)


class UnfinishedOutput:
    """Folder of a conversion that has not ended.

    Args:
        out: final name of the output, which does not exist.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.unfinished")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other conversions out of it.

        Raises:
            ConfigError: the output exists, its folder does not, or another conversion is writing.
        """
        if self.out.exists():
            raise ConfigError(f"{self.out} exists already; name another output, or remove it.")
        if not self.out.absolute().parent.is_dir():
            raise ConfigError(f"There is no folder {self.out.absolute().parent}; create it.")
        try:
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / _LOCK).open("a")
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error.strerror}.") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"Another conversion is writing to {self.folder}; wait until it ends."
                ) from None
            yield

    def write(
        self, file: TensorFile, source: Sequence[object], progress: Callable[[int], object]
    ) -> None:
        """Write a file of tensors, or the rest of it.

        Args:
            file: the file.
            source: what the bytes depend on. Work of a conversion of another source is discarded.
            progress: called with the bytes that are complete.

        Raises:
            ConfigError: the disk is too small or cannot be written to.
        """
        path, key_file = self.folder / file.name, self.folder / _KEY
        key = hashlib.sha256(repr(source).encode() + file.head).hexdigest()
        with self.disk_errors():
            if not key_file.exists() or key_file.read_text() != key:
                self._discard()
                key_file.write_text(key)
            self._require_space(file, path)
            with path.open("ab") as stream:
                done = self._resume(stream.fileno(), file)
                if done == 0:
                    stream.write(file.head)
                progress(sum(piece.nbytes for piece in file.pieces[:done]))
                for data in _computed(file.pieces[done:]):
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                    progress(len(data))

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn the errors of the disk into a `ConfigError`."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.out} cannot be written: {error.strerror}. The same command continues it."
            ) from error

    def _discard(self) -> None:
        """Remove all files of an earlier conversion."""
        for file in self.folder.iterdir():
            if file.is_dir():
                shutil.rmtree(file)
            elif file.name != _LOCK:
                file.unlink()

    def _require_space(self, file: TensorFile, path: Path) -> None:
        written = path.stat().st_size if path.exists() else 0
        needed, free = file.nbytes - written, shutil.disk_usage(self.folder).free
        if needed > free:
            raise ConfigError(
                f"The output needs {needed / MIB:,.1f} MiB more, and the disk of {self.folder} has "
                f"{free / MIB:,.1f} MiB free; free space, or name another folder."
            )

    def _resume(self, descriptor: int, file: TensorFile) -> int:
        """Cut off an incomplete piece, and return the number of complete ones."""
        size, end, done = os.fstat(descriptor).st_size, len(file.head), 0
        if size < end:
            os.ftruncate(descriptor, 0)
            return 0
        while done < len(file.pieces) and end + file.pieces[done].nbytes <= size:
            end += file.pieces[done].nbytes
            done += 1
        if done == 0:  # the head is written again
            end = 0
        os.ftruncate(descriptor, end)
        return done

    def finish_folder(self) -> None:
        """Give the folder its final name.

        Raises:
            ConfigError: the disk failed.
        """
        with self.disk_errors():
            self.folder.rename(self.out)
            (self.out / _KEY).unlink()
            (self.out / _LOCK).unlink()

    def finish_file(self, name: str) -> None:
        """Give a file its final name, and remove the folder.

        Raises:
            ConfigError: the disk failed.
        """
        with self.disk_errors():
            (self.folder / name).rename(self.out)
            shutil.rmtree(self.folder)


def _computed(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Yield the bytes of pieces in their order, and compute the next ones meanwhile.

    Raises:
        AssertionError: a piece has another size than it should.
    """
    threads = num_cpus()
    waiting: deque[tuple[Piece, Future[bytes]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for piece in pieces:
                waiting.append((piece, pool.submit(piece.make)))
                if len(waiting) > 2 * threads:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def _result(piece: Piece, future: Future[bytes]) -> bytes:
    data = future.result()
    assert len(data) == piece.nbytes, (len(data), piece.nbytes)
    return data
