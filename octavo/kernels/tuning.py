"""Kernel settings without a best value for all processors, measured at the first start.

They control how weights are fetched, how long idle threads spin, and how small a piece of work is
shared. They change no bit of the results. The defaults are sound everywhere. Another choice
replaces a default only if it is much faster each time, as the machine may run other work meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import octavo
from octavo import _native
from octavo.kernels.memory import Arena, map_memory
from octavo.kernels.native import NativeOps
from octavo.kernels.sizes import packed_nbytes
from octavo.kernels.weights import PackedWeight
from octavo.system.tensor import empty, zeros

logger = logging.getLogger(__name__)

# Limit of the median of the rounds, relative to the default's time.
_CLEARLY_BETTER = 1 / 1.15
_LEAST_ROUNDS = 3
# Time for all rounds of a choice. Including the first read of the memory, tuning takes 100 ms.
_SECONDS = 0.02
# Larger than the caches, like the weights of a model.
_WEIGHT_NBYTES = 64 * 2**20
_DTYPE = "bfloat16"
# Larger than any file with a choice.
_MOST_NBYTES = 4096

Value = TypeVar("Value", bool, int)


class Tuning(msgspec.Struct, frozen=True):
    """Chosen values."""

    past_caches: bool
    """True if weights that a step uses once are fetched past the caches (prefetchnta)."""
    spin_us: int
    """Microseconds that an idle thread spins."""
    grain: int
    """Vector operations that are worth sharing between threads."""

    def apply(self) -> None:
        """Set the values for the kernels of this process; no kernel may run."""
        _native.set_tuning(self.past_caches, self.spin_us, self.grain)


DEFAULT = Tuning(*_native.tuning())
"""Default for all processors; `past_caches` depends on their maker."""
SPINS = (10, 50, 200)
GRAINS = (2500, 10000, 40000)


def tune(folder: Path | None, processor: str) -> None:
    """Apply the best choice for this processor, from `folder` or by measuring.

    Without a folder the defaults stay. An error in the folder is logged and never prevents the
    start. While another process measures, the defaults stay: this process does not wait.
    """
    if folder is None:
        return
    file = folder / f"{_key(processor)}.json"
    try:
        tuning = _read(file)
        how = f"from {file}"
        if tuning is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder / "lock") as alone:
                if not alone:
                    return
                start = time.perf_counter()
                tuning = measure()
                how = f"measured in {time.perf_counter() - start:.3f} s"
                _write(file, tuning)
    except OSError as error:
        logger.debug("kernels are not tuned: %s", error)
        return
    tuning.apply()
    logger.debug("kernels: %s (%s)", tuning, how)


def measure() -> Tuning:
    """Measure the best choice for this processor and its current threads; takes 100 ms at most.

    Afterwards the kernels use the defaults.
    """
    past_caches = choose("past_caches", (False, True), _read_weights())
    if _native.num_threads() == 1:
        return msgspec.structs.replace(DEFAULT, past_caches=past_caches)
    return Tuning(
        past_caches,
        choose("spin_us", SPINS, _make_steps()),
        choose("grain", GRAINS, _make_small_kernels()),
    )


def choose(field: str, values: Sequence[Value], run: Callable[[], object]) -> Value:
    """Return the value of a `Tuning` field that makes `run` clearly fastest, or the default.

    Afterwards the kernels use the defaults.
    """
    choices = [msgspec.structs.replace(DEFAULT, **{field: value}) for value in values]
    taken: list[list[float]] = [[] for _ in choices]
    run()  # allocates the memory and wakes the threads
    end = time.perf_counter() + _SECONDS
    while len(taken[0]) < _LEAST_ROUNDS or time.perf_counter() < end:
        first = len(taken[0])  # rotates: the first may find cold caches
        for i in range(len(choices)):
            now = (first + i) % len(choices)
            choices[now].apply()
            start = time.perf_counter()
            run()
            taken[now].append(time.perf_counter() - start)
    DEFAULT.apply()
    default = choices.index(DEFAULT)
    best, least = values[default], _CLEARLY_BETTER
    for value, times in zip(values, taken, strict=True):
        ratios = [a / b for a, b in zip(times, taken[default], strict=True)]
        if max(ratios) < 1 and statistics.median(ratios) <= least:
            best, least = value, statistics.median(ratios)
    return best


def _read_weights() -> Callable[[], object]:
    """Make a multiplication of one row by a large weight, as in a decode step at batch 1."""
    k = 2048
    return _record([_WEIGHT_NBYTES // (2 * k)], k)


def _make_steps() -> Callable[[], object]:
    """Make sequences of kernels with pauses, as between steps."""
    kernels = _record([512] * 12, 512)

    def run() -> None:
        for _ in range(6):
            kernels()
            end = time.perf_counter() + 100e-6
            while time.perf_counter() < end:
                pass

    return run


def _make_small_kernels() -> Callable[[], object]:
    """Make products of a few microseconds, which may or may not be worth sharing."""
    return _record([64, 128, 256, 512, 1024] * 20, 512)


def _record(outputs: Sequence[int], k: int) -> Callable[[], object]:
    """Record products of a row and weights with the given outputs in sequence, as in a step."""
    ops, plan, weights = NativeOps(), _native.Plan(), {}
    for n in set(outputs):
        # Without a write, all pages would be one zero page.
        data = map_memory(packed_nbytes(n, k, "bfloat16"))
        data.numpy()[...] = 1
        weights[n] = PackedWeight(data, n, k, _DTYPE, _native.panel())
    x = zeros(1, k, dtype=_DTYPE)
    results = {n: empty(1, n, dtype=_DTYPE) for n in weights}
    with ops.record(plan, Arena(0)):
        for n in outputs:
            ops.linear(x, weights[n], out=results[n])

    def run(held: object = (x, weights, results)) -> None:
        plan.run(1, 1, 1)

    return run


def _key(processor: str) -> str:
    """Return a key of the processor and of the other facts that the choice depends on."""
    what = [octavo.__version__, processor, _native.isa(), _native.num_threads()]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()


def _read(file: Path) -> Tuning | None:
    """Read an earlier choice; return None if none is stored or the file is invalid."""
    try:
        tuning = msgspec.json.decode(_read_small(file), type=Tuning)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        logger.debug("%s is written anew: %s", file, error)
        return None
    return tuning if tuning.spin_us in SPINS and tuning.grain in GRAINS else None


def _read_small(file: Path) -> bytes:
    """Read a file if `_write` may have written it.

    Raises:
        ValueError: the file is a link, or not a small regular file.
        OSError: the file cannot be read.
    """
    if file.is_symlink():
        raise ValueError("it is a link")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_NBYTES:
            raise ValueError("it is no small file")
        return os.read(descriptor, _MOST_NBYTES)
    finally:
        os.close(descriptor)


def _write(file: Path, tuning: Tuning) -> None:
    descriptor, name = tempfile.mkstemp(".unfinished", dir=file.parent)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(tuning))
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[bool]:
    """Yield True if this process holds the lock; the system releases the lock of a dead process."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
