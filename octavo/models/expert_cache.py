"""Expert cache: all experts stay in the file of packed weights, and the most used are in memory.

The native part (csrc/expert_cache.h) reads missing experts while a step computes, and those that
the next layer may use. This file connects it with a loaded model, and estimates the expected speed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.checkpoints.base import Checkpoint
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.kernels.memory import map_memory, release_memory
from octavo.models.expert_sizes import ExpertSizes
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import ExpertFile, WeightCache, weights_key
from octavo.models.weights import Weight
from octavo.system.tensor import HostTensor

_PROBED = 2 * 2**20, 32, 0.25  # bytes of a read, number of reads, seconds at most
_READERS = 8  # kReaders in csrc/expert_cache.cpp


class ExpertCache:
    """Experts of a loaded model, of which the most used are in memory.

    Args:
        weights: all weights of the model or of the rank's part, in the order of the file.
        places: bytes [begin, end) of each weight in the file.
        dtype: type of the model.
        slots: number of experts in memory.
    """

    def __init__(
        self, weights: Sequence[Weight], places: dict[str, slice], dtype: str, slots: int
    ) -> None:
        sizes = ExpertSizes.of(weights, dtype)
        self.memory = map_memory(slots * sizes.largest)
        """The slots. While a model is packed, the first slot has one expert after the other."""
        self._places = places
        self._file: Path | None = None
        self.counts: NDArray[np.int64] = np.zeros(6, np.int64)
        """Hits, misses, bytes read, failures, experts fetched ahead, and those of them that were
        used: ExpertCount in csrc/expert_cache.h."""
        self._native = _native.ExpertCache(
            memory=self.memory,
            slot_nbytes=sizes.largest,
            slots=slots,
            counts=self.counts.ctypes.data,
        )
        self.layers: dict[str, _native.ExpertLayer] = {}
        """Layers, by the names of the blocks."""
        by_block: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.expert is not None:
                by_block.setdefault(weight.expert.block, []).append(weight)
        for block, own in by_block.items():
            assert own[0].expert is not None
            begins = [-1] * own[0].expert.count
            for up in own[::2]:
                assert up.expert is not None
                begins[up.expert.index] = places[up.name].start
            first, second = (weight.nbytes(dtype) for weight in own[:2])
            self.layers[block] = self._native.add_layer(
                begins=begins, nbytes=first + second, down=first
            )

    def count_in(self, counts: NDArray[np.int64]) -> None:
        """Count in `counts` [6] from now on."""
        self.counts = counts
        self._native.count_in(counts.ctypes.data)

    def place(self, weight: Weight, begin: int) -> HostTensor:
        """Return the memory of an expert's weight in the first slot: uint8.

        Args:
            weight: the weight.
            begin: position of the expert in the file.
        """
        place = self._places[weight.name]
        return self.memory[place.start - begin : place.stop - begin]

    def open(self, file: ExpertFile) -> None:
        """Read the experts from a file from now on, which the cache closes."""
        self._file = file.path
        self._native.open(file.descriptor, file.sums)

    def release(self) -> None:
        """Release the memory of all slots to the system; the experts are read again when needed."""
        self._native.release()
        release_memory(self.memory)

    def take_error(self) -> str | None:
        """Return a message about the experts that could not be read since the last call, if any."""
        reason = self._native.take_error()
        if not reason:
            return None
        return (
            f"{self._file} {reason}: requests that need an expert which cannot be read fail. "
            "Restart the engine, which packs the weights again"
        )


def find_file(
    config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint, dtype: str
) -> Path | None:
    """Return a file for `describe_speed`, if there is one.

    It is the file of packed weights or, until that is written, the largest file of the checkpoint.

    Args:
        config: the settings.
        spec: the model, or a rank's part.
        checkpoint: the model.
        dtype: type of the model.
    """
    with contextlib.suppress(OctavoError, OSError):
        cache, key = WeightCache.from_config(config), weights_key(spec, checkpoint, dtype)
        if cache is not None and key is not None and cache.file(key).is_file():
            return cache.file(key)
        return max(checkpoint.weight_files, key=lambda file: file.stat().st_size, default=None)
    return None


def describe_speed(per_token: int, others: int, file: Path, num_threads: int) -> str:
    """Return the range of the expected tokens/s of one request, as a phrase.

    The slowest speed holds if every expert is read from the disk, the fastest one if no expert is.
    The speeds of disk and memory are measured, for at most 0.3 s.

    Args:
        per_token: bytes of the experts that a token uses.
        others: bytes of all other weights.
        file: a large file on the disk that has the experts.
        num_threads: threads that compute.
    """
    memory, disk = _memory_speed(num_threads), _disk_speed(file)
    fast = (per_token + others) / memory
    return (
        f"; one request makes about {1 / (fast + per_token / disk):,.3g} tokens/s if all experts"
        f" are read from the disk ({disk / 2**20:,.0f} MiB/s), at most {1 / fast:,.3g} if none is"
    )


def _memory_speed(num_threads: int) -> float:
    """Return the bytes that `num_threads` threads read from memory in a second."""
    numbers = np.ones((num_threads, 2**21), np.int64)  # 16 MiB each, more than most caches
    with ThreadPoolExecutor(num_threads) as threads:
        start = time.perf_counter()
        list(threads.map(np.max, numbers))
        return numbers.nbytes / (time.perf_counter() - start)


def _disk_speed(file: Path) -> float:
    """Return the bytes in a second that several threads read from places all over a file.

    Pages of the file that the system keeps in memory are dropped first, as far as it allows.
    """
    nbytes, count, seconds = _PROBED
    size = file.stat().st_size
    begins = [size * i // count // 4096 * 4096 for i in range(count)]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for begin in begins:
            os.posix_fadvise(descriptor, begin, nbytes, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()

        def read(begin: int) -> int:
            late = time.perf_counter() - start > seconds
            return 0 if late else len(os.pread(descriptor, nbytes, begin))

        with ThreadPoolExecutor(_READERS) as threads:
            done = sum(threads.map(read, begins))
        return max(1, done) / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
