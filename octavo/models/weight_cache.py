"""Cache of packed weights on disk, so that the next start reads them and packs nothing.

A file contains the memory of a loaded model (`octavo.models.loader`), a checksum for each chunk,
and a digest of the checksums and of the key, which describes the sources of the memory. A file that
does not match is deleted and written again. The weights are copied from the file, not mapped:
mapped files use small pages, or huge pages of the system's choice, which slows down every decode
step. Experts may stay in the file (`octavo.models.expert_cache`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

import octavo
from octavo import _native
from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.folder import module_file
from octavo.checkpoints.mistral.files import PARAMS
from octavo.config import EngineConfig, cache_folder
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weight
from octavo.quantization.plain import PLAIN
from octavo.system.device import cpu_memory
from octavo.system.private_folder import check_private_folder

logger = logging.getLogger(__name__)

_VERSION = 4  # of the loader's layout of memory, and of the checksums
_CHUNK = 2 * 2**20
# Odd, so that each bit of a word changes the sum; distinct, so that the order of words does.
_FACTORS = np.arange(1, _CHUNK // 4, 2, dtype=np.uint64)
_STARTED = time.time()  # files that were used later belong to running engines, such as other ranks
_SUFFIX, _UNFINISHED, _LOCK = ".weights", ".unfinished", "lock"
# Space that the cache always leaves free: a share of the disk, and at least a number of bytes.
_MARGIN_SHARE, _MARGIN_NBYTES = 0.05, 2**30

Bytes = NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Callback for progress: its arguments are (done, total), in the same unit."""


def weights_key(spec: ModelSpec, checkpoint: Checkpoint, dtype: str) -> bytes | None:
    """Return everything that a model's loaded weights depend on; None if they have no files.

    A file counts as unchanged if its path, inode, size, modification time and inode change time are
    the same. No program can set back the inode change time.

    Raises:
        ModelError: the checkpoint cannot be used.
        OSError: a file does not exist any more.
    """
    files = checkpoint.weight_files
    if not files:
        return None
    if checkpoint.path.is_dir():
        files = files + [module_file(checkpoint.path / name) for name in spec.expected.folders]
    if checkpoint.config_file.name == PARAMS:  # the order of rows depends on its numbers of heads
        files = [*files, checkpoint.config_file]
    native = os.stat(_native.__file__)
    weights = spec.weights()
    return msgspec.json.encode(
        [
            [_VERSION, octavo.__version__],
            # Another build may use another layout.
            [_native.isa(), _native.panel(), native.st_size, native.st_mtime_ns],
            [dtype, _describe_forms(weights), checkpoint.load_format],
            [_identity(file) for file in files],
            [spec.architecture, [_describe(weight) for weight in weights]],
        ]
    )


_NOT_IN_KEYS = ("dtypes", "dummy", "optional", "other_shapes")
"""Fields of a `Source` that depend on other fields, or do not change the weights of a file."""


_LATER = ("group_parts", "alternate", "index", "order")
"""Fields of a `Source` that a key contains only if the weight uses them."""


def _describe_forms(weights: list[Weight]) -> str | list[str] | None:
    """Return the name of the form of all linear weights, None for plain, or one name for each."""
    names = [weight.form.name for weight in weights if weight.kind == "linear"]
    if len(set(names)) > 1:
        return names
    return None if names[0] == PLAIN.name else names[0]


def _describe(weight: Weight) -> dict[str, object]:
    """Return a key's description of a weight; another text would orphan the files of all users."""
    sources = [
        {
            name: value
            for name, value in vars(source).items()
            if name not in _NOT_IN_KEYS and (name not in _LATER or value not in ((), False, None))
        }
        for source in weight.sources
    ]
    described: dict[str, object] = {
        "name": weight.name,
        "kind": weight.kind,
        "shape": weight.shape,
        "sources": sources,
        "dummy": weight.sources[0].dummy,
        "whole": weight.whole,
    }
    return described if weight.dtype is None else described | {"dtype": weight.dtype}


def _identity(file: Path) -> list[object]:
    path = file.resolve()
    info = path.stat()
    return [str(path), info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


@dataclass(frozen=True)
class Image:
    """Weights in a file, in their order."""

    nbytes: int
    experts: tuple[tuple[int, int], ...] = ()
    """Bytes [begin, end) of each expert, ascending."""

    def chunks(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the chunks that have a checksum: begin, end, and True for a part of an expert.

        Each expert begins with a new chunk, so that it can be checked alone.
        """
        done = 0
        for begin, end in (*self.experts, (self.nbytes, self.nbytes)):
            for first, last, is_expert in ((done, begin, False), (begin, end, True)):
                for at in range(first, last, _CHUNK):
                    yield at, min(at + _CHUNK, last), is_expert
            done = end


@dataclass(frozen=True)
class ExpertFile:
    """Open file with the experts of a model."""

    path: Path
    descriptor: int
    """The caller must close it."""
    sums: list[int]
    """Checksums of the chunks of all experts."""


class WeightCache:
    """Folder of loaded weights; it belongs to the user, and all engines that name it share it.

    A failure of the cache costs a warning and the time to pack, but never prevents the start.

    Args:
        folder: created when it is needed.
        most_nbytes: capacity; the least recently used files are deleted first. Default: a quarter
            of the disk's free bytes, where the folder's files count as free.
    """

    def __init__(self, folder: Path, most_nbytes: int | None = None) -> None:
        self._folder = folder
        self._most_nbytes = most_nbytes
        self.writer: threading.Thread | None = None
        """Thread that `keep` has started."""

    @classmethod
    def from_config(cls, config: EngineConfig) -> WeightCache | None:
        """Return the configured cache, or None if it is disabled."""
        asked = config.load.weight_cache
        if asked == "off":
            return None
        folder = cache_folder() if asked is None else Path(asked).expanduser()
        if folder is None:
            return None
        return cls(folder / "weights" if asked is None else folder, config.load.weight_cache_bytes)

    def file(self, key: bytes) -> Path:
        """Return the path of the weights of a key; the file may not exist."""
        return self._folder / (hashlib.sha256(key).hexdigest() + _SUFFIX)

    def files(self) -> list[Path]:
        """Return all files of weights in the folder."""
        return sorted(self._folder.glob("*" + _SUFFIX))

    def read(
        self,
        key: bytes,
        memory: Bytes,
        num_threads: int,
        progress: Progress | None = None,
        image: Image | None = None,
    ) -> bool:
        """Read the weights of a key into `memory` [nbytes] with the given number of threads.

        `progress` is called with the bytes read and the total.

        Returns:
            True if the weights were read. False if the cache does not have them or the file is
            damaged; then the contents of `memory` are undefined.
        """
        image = image or Image(len(memory))
        found = self._read(key, image, memory, num_threads, progress, whole=True)
        if found is not None:
            os.close(found.descriptor)
        return found is not None

    def read_without_experts(
        self,
        key: bytes,
        image: Image,
        memory: Bytes,
        num_threads: int,
        progress: Progress | None = None,
    ) -> ExpertFile | None:
        """Read all weights but the experts', one after the other, into `memory`; see `read`.

        Returns:
            The open file with the experts, which are not checked; None if `read` returns False.
        """
        return self._read(key, image, memory, num_threads, progress, whole=False)

    def _read(
        self,
        key: bytes,
        image: Image,
        memory: Bytes,
        num_threads: int,
        progress: Progress | None,
        *,
        whole: bool,
    ) -> ExpertFile | None:
        file = self.file(key)
        try:
            check_private_folder(self._folder)
            # The cache writes neither links nor pipes.
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._drop(file, f"cannot be opened ({error.strerror or error})")
            return None
        try:
            sums = _read_checked(descriptor, key, image, memory, num_threads, progress, whole)
            os.utime(descriptor)  # records the use
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, _DamagedError):
                self._drop(file, str(error))
                return None
            if isinstance(error, OSError):
                self._drop(file, f"cannot be read ({error.strerror})")
                return None
            raise
        return ExpertFile(file, descriptor, sums)

    def _drop(self, file: Path, reason: str) -> None:
        logger.warning("%s %s; packing the weights again", file, reason)
        with contextlib.suppress(OSError):
            file.unlink()

    @contextlib.contextmanager
    def create(self, key: bytes, image: Image, memory: Bytes) -> Iterator[ImageWriter]:
        """Write weights whose experts are not in memory; other writers of the folder wait.

        The file is complete when the context ends.

        Args:
            key: see `weights_key`.
            image: the weights.
            memory: all weights but the experts', one after the other, filled when the context ends.

        Raises:
            ConfigError: the folder cannot be used, or has no room.
        """
        nbytes, outside = image.nbytes + _trailer_nbytes(image), False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private_folder(self._folder)
            with self._locked():
                self._remove_unfinished()
                most = self._make_room(nbytes, used_since=_STARTED)
                if most < nbytes:
                    raise ConfigError(
                        f"expert_cache needs a file of {nbytes / 2**20:,.0f} MiB in "
                        f"{self._folder}, which may hold {most / 2**20:,.0f} MiB; raise "
                        "weight_cache_bytes, or set weight_cache to a folder of a larger disk."
                    )
                with self._new_file(key) as descriptor:
                    writer = ImageWriter(self.file(key), descriptor, image)
                    try:
                        outside = True
                        yield writer
                        outside = False
                        writer.finish(key, memory)
                    except BaseException:
                        os.close(writer.file.descriptor)
                        raise
        except OSError as error:
            if outside:  # of the checkpoint, which the caller reads meanwhile
                raise
            raise _cannot_write(self._folder, error) from None

    def keep(
        self, key: bytes, memory: Bytes, still: Callable[[], bool], image: Image | None = None
    ) -> None:
        """Write loaded weights [nbytes] on a thread of lowest priority, for `read`.

        The interpreter waits for the thread before it exits.

        Args:
            key: see `weights_key`.
            memory: the weights, which must not change until the thread ends.
            still: returns True if the key still matches the files, which may have changed while
                they were read.
            image: the places of the experts.
        """

        def write() -> None:
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            try:
                if still():
                    self._write(key, memory, image or Image(len(memory)))
            except (OSError, ModelError) as error:
                logger.warning(
                    "packed weights cannot be kept in %s, so the next start packs them again (%s);"
                    " set weight_cache to another folder, or to off",
                    self._folder,
                    error,
                )

        self.writer = threading.Thread(target=write, name="octavo-weight-cache")
        self.writer.start()

    def _write(self, key: bytes, memory: Bytes, image: Image) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private_folder(self._folder)
        with self._locked():
            if self.file(key).exists():  # another process was faster
                return
            self._remove_unfinished()
            nbytes = image.nbytes + _trailer_nbytes(image)
            if (most := self._make_room(nbytes)) < nbytes:
                logger.info(
                    "packed weights are not kept: they need %d MiB, and %s may hold %d MiB",
                    nbytes // 2**20,
                    self._folder,
                    most // 2**20,
                )
                return
            with self._new_file(key) as descriptor:
                sums = []
                for begin, end, _ in image.chunks():
                    sums.append(_sum(memory[begin:end]))
                    _pwrite(descriptor, memory[begin:end].data, begin)
                _pwrite(descriptor, _trailer(key, sums), image.nbytes)
        logger.debug("packed weights are kept in %s for the next start", self._folder)

    @contextlib.contextmanager
    def _new_file(self, key: bytes) -> Iterator[int]:
        """Create a key's file: return a descriptor, which is closed when the context ends."""
        descriptor, name = tempfile.mkstemp(_UNFINISHED, dir=self._folder)
        try:
            yield descriptor
            os.fsync(descriptor)
            os.rename(name, self.file(key))
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(descriptor)

    def _remove_unfinished(self) -> None:
        """Remove what a process that died has left."""
        for left in self._folder.glob("*" + _UNFINISHED):
            left.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder for writing; the system releases the lock of a process that dies."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._folder / _LOCK, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, nbytes: int, used_since: float = math.inf) -> int:
        """Delete the least recently used files until `nbytes` fit; return the bytes that may fit.

        Nothing is deleted if `nbytes` cannot fit. Files that were used after the time `used_since`
        stay.
        """
        files = [(file, file.lstat()) for file in self.files()]
        held = sum(info.st_size for _, info in files)
        kept = sum(info.st_size for _, info in files if info.st_mtime >= used_since)
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        margin = max(int(disk.f_blocks * disk.f_frsize * _MARGIN_SHARE), _MARGIN_NBYTES)
        most = (free + held) // 4 if self._most_nbytes is None else self._most_nbytes
        most = min(most, free + held - margin)
        if nbytes > most - kept:
            return max(most - kept, 0)
        for file, info in sorted(files, key=lambda item: item[1].st_mtime_ns):
            if held + nbytes <= most:
                break
            file.unlink(missing_ok=True)
            held -= info.st_size
        return most


class ImageWriter:
    """Writer of a file whose experts arrive one after the other; see `WeightCache.create`."""

    def __init__(self, path: Path, descriptor: int, image: Image) -> None:
        self._image = image
        self._sums: dict[int, int] = {}  # by the beginning of a chunk
        self.file = ExpertFile(path, os.dup(descriptor), [])
        """The written file, complete when the context has ended."""

    def write(self, begin: int, expert: Bytes) -> None:
        """Write the weights of the expert that begins at byte `begin`.

        Raises:
            ConfigError: the file cannot be written.
        """
        for at in range(0, len(expert), _CHUNK):
            self._sums[begin + at] = _sum(expert[at : at + _CHUNK])
        try:
            _pwrite(self.file.descriptor, expert.data, begin)
        except OSError as error:
            raise _cannot_write(self.file.path.parent, error) from None

    def finish(self, key: bytes, memory: Bytes) -> None:
        """Write the other weights, and the checksums."""
        sums, done = [], 0
        for begin, end, is_expert in self._image.chunks():
            if is_expert:
                sums.append(self._sums[begin])
                self.file.sums.append(sums[-1])
                continue
            chunk = memory[done : done + end - begin]
            done += len(chunk)
            sums.append(_sum(chunk))
            _pwrite(self.file.descriptor, chunk.data, begin)
        _pwrite(self.file.descriptor, _trailer(key, sums), self._image.nbytes)


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"expert_cache cannot write the packed weights to {folder} ({error}); set weight_cache to "
        "another folder."
    )


def _pwrite(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all bytes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


class _DamagedError(Exception):
    """Error for a file that is damaged or that this user has not written."""


def _read_checked(
    descriptor: int,
    key: bytes,
    image: Image,
    memory: Bytes,
    num_threads: int,
    progress: Progress | None,
    whole: bool,
) -> list[int]:
    """Fill `memory`, with or without the experts; return the checksums of all their chunks.

    Raises:
        _DamagedError: the file does not contain the complete weights of `key`.
    """
    info, nbytes = os.fstat(descriptor), image.nbytes
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise _DamagedError("is not a file that only this user can write to")
    size = _trailer_nbytes(image)
    if info.st_size != nbytes + size:
        raise _DamagedError(f"has {info.st_size} bytes instead of {nbytes + size}")
    trailer = os.pread(descriptor, size, nbytes)
    sums = np.frombuffer(trailer[:-32], dtype="<u8").tolist()
    if trailer != _trailer(key, sums):
        raise _DamagedError("belongs to other weights or is damaged")

    chunks, done, of_experts = [], 0, []  # (place in the file, memory, checksum)
    for (begin, end, is_expert), checksum in zip(image.chunks(), sums, strict=True):
        if is_expert:
            of_experts.append(checksum)
        if whole or not is_expert:
            chunks.append((begin, memory[done : done + end - begin], checksum))
            done += end - begin
    assert done == len(memory)

    def read(item: tuple[int, Bytes, int]) -> int:
        begin, chunk, checksum = item
        read = os.preadv(descriptor, [chunk.data], begin)
        return len(chunk) if read == len(chunk) and _sum(chunk) == checksum else 0

    with ThreadPoolExecutor(num_threads) as threads:
        done = 0
        for count in threads.map(read, chunks):
            if not count:
                raise _DamagedError("is damaged")
            done += count
            if progress is not None:
                progress(done, len(memory))
    return of_experts


def _sum(chunk: Bytes) -> int:
    whole = len(chunk) // 8 * 8
    words = int(np.dot(chunk[:whole].view("<u8"), _FACTORS[: whole // 8]))
    return (words + int.from_bytes(chunk[whole:].tobytes(), "little")) % 2**64


def _trailer(key: bytes, sums: list[int]) -> bytes:
    written = np.array(sums, dtype="<u8").tobytes()
    return written + hashlib.sha256(key + written).digest()


def _trailer_nbytes(image: Image) -> int:
    return sum(1 for _ in image.chunks()) * 8 + 32


def read_ahead(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint, dtype: str) -> None:
    """Read the files that loading will need into the system's file cache, on a thread.

    It reads at most half of the free memory: the rest is for the weights.
    """
    cache = WeightCache.from_config(config)

    def read() -> None:
        with contextlib.suppress(OctavoError, OSError):  # loading will report the same error
            left = cpu_memory(config.device.numa_node)[1] // 2
            files = checkpoint.weight_files
            key = weights_key(spec, checkpoint, dtype)
            if cache is not None and key is not None and cache.file(key).is_file():
                if config.load.expert_cache is not None:  # most of the file is experts
                    return
                files = [cache.file(key)]
            for file in files:
                left -= _read_file(file, left)

    if sys.platform == "linux":
        threading.Thread(target=read, name="octavo-read-ahead", daemon=True).start()


def _read_file(file: Path, most: int) -> int:
    """Read up to `most` bytes of a file; skip chunks with the first byte already in memory."""
    buffer = bytearray(_CHUNK)
    first = memoryview(buffer)[:1]
    with file.open("rb", buffering=0) as stream:
        size = min(os.fstat(stream.fileno()).st_size, most)
        for begin in range(0, size, _CHUNK):
            try:
                os.preadv(stream.fileno(), [first], begin, os.RWF_NOWAIT)
            except OSError:  # it would have to wait
                os.preadv(stream.fileno(), [buffer], begin)
    return size
