"""Use of a cache of weights by one of several processes; it imports no torch, so it starts at once.

python -m tests.models.weight_cache_race FOLDER SEED
"""

import os
import sys
from pathlib import Path

import numpy as np

from octavo.models.weight_cache import Bytes, WeightCache


def memory(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def keep(cache: WeightCache, key: bytes, data: Bytes) -> None:
    cache.keep(key, data, lambda: True)
    assert cache.writer is not None
    cache.writer.join()


def read(cache: WeightCache, key: bytes, nbytes: int) -> Bytes | None:
    data = np.zeros(nbytes, dtype=np.uint8)
    return data if cache.read(key, data, 2) else None


def race(folder: Path, seed: int) -> None:
    """Write and read two keys over and over where only one fits."""
    cache = WeightCache(folder, 5000)
    os.fsync = lambda _: None  # type: ignore[assignment]  # no waits for the disk
    for i in range(60):
        key = (seed + i) % 2
        keep(cache, bytes([key]), memory(4096, key))
        found = read(cache, bytes([key]), 4096)
        assert found is None or (found == memory(4096, key)).all()


if __name__ == "__main__":
    race(Path(sys.argv[1]), int(sys.argv[2]))
