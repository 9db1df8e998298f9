"""What no choice is best for on every processor, measured at the first start on one.

How weights are fetched, how long threads wait awake, and how little work is shared between them:
none of it changes a bit of what is computed. The defaults are sound everywhere; another choice is
taken only where it is quicker by far and every time, as the machine may do other work meanwhile.
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
import torch

import octavo
from octavo import _native
from octavo.kernels.base import PackedWeight
from octavo.kernels.memory import Arena, map_memory
from octavo.kernels.native import NativeOps
from octavo.kernels.sizes import packed_nbytes

logger = logging.getLogger(__name__)

# Of the default's time, in the median of the rounds.
_CLEARLY_BETTER = 1 / 1.15
_LEAST_ROUNDS = 3
# For all rounds of a choice. With the memory that is read it makes 100 ms.
_SECONDS = 0.02
# More than the caches hold, as the weights of a model are.
_WEIGHT_NBYTES = 64 * 2**20
_DTYPE = torch.bfloat16
# A file with a choice has fewer.
_MOST_NBYTES = 4096

Value = TypeVar("Value", bool, int)


class Tuning(msgspec.Struct, frozen=True):
    """What was chosen."""

    past_caches: bool
    """Whether weights that a step uses once are fetched past the caches (prefetchnta)."""
    spin_us: int
    """Microseconds that a thread waits awake."""
    grain: int
    """Vector operations that are worth sharing between threads."""

    def apply(self) -> None:
        """Has the kernels of this process go by it; none may be running."""
        _native.set_tuning(self.past_caches, self.spin_us, self.grain)


DEFAULT = Tuning(*_native.tuning())
"""For all processors; `past_caches` by their maker."""
SPINS = (10, 50, 200)
GRAINS = (2500, 10000, 40000)


def tune(folder: Path | None, processor: str) -> None:
    """Applies what suits a processor, this one, from `folder` or by measuring.

    Without a folder the defaults stay. Whatever is wrong with it costs a line of the log, never the
    start. While another process measures, the defaults are kept rather than waited for it.
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
    """What suits this processor, with as many threads as kernels use now; takes 100 ms at most.

    The kernels go by the defaults afterwards.
    """
    with torch.inference_mode():
        past_caches = choose("past_caches", (False, True), _read_weights())
        if _native.num_threads() == 1:
            return msgspec.structs.replace(DEFAULT, past_caches=past_caches)
        return Tuning(
            past_caches,
            choose("spin_us", SPINS, _make_steps()),
            choose("grain", GRAINS, _make_small_kernels()),
        )


def choose(field: str, values: Sequence[Value], run: Callable[[], object]) -> Value:
    """The value of a `Tuning`'s field with which `run` is clearly quickest, or else the default's.

    The kernels go by the defaults afterwards.
    """
    choices = [msgspec.structs.replace(DEFAULT, **{field: value}) for value in values]
    taken: list[list[float]] = [[] for _ in choices]
    run()  # the memory is there, and the threads are awake
    end = time.perf_counter() + _SECONDS
    while len(taken[0]) < _LEAST_ROUNDS or time.perf_counter() < end:
        first = len(taken[0])  # they take turns at it: the first may find the caches in disorder
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
    """A row meets a large weight, as in a decode step at batch 1."""
    k = 2048
    return _record([_WEIGHT_NBYTES // (2 * k)], k)


def _make_steps() -> Callable[[], object]:
    """Kernels in a row, then a pause as between two steps, and so on."""
    kernels = _record([512] * 12, 512)

    def run() -> None:
        for _ in range(6):
            kernels()
            end = time.perf_counter() + 100e-6
            while time.perf_counter() < end:
                pass

    return run


def _make_small_kernels() -> Callable[[], object]:
    """Products of a few microseconds, of which it is open whether they are worth sharing."""
    return _record([64, 128, 256, 512, 1024] * 20, 512)


def _record(outputs: Sequence[int], k: int) -> Callable[[], object]:
    """Products of a row and weights with so many outputs, one after the other, as in a step."""
    ops, plan, weights = NativeOps(), _native.Plan(), {}
    for n in set(outputs):
        # Pages that nothing was written to would all be one.
        data = map_memory(packed_nbytes(n, k, "bfloat16")).fill_(1)
        weights[n] = PackedWeight(data, n, k, _DTYPE, _native.panel())
    x = torch.zeros(1, k, dtype=_DTYPE)
    results = {n: torch.empty(1, n, dtype=_DTYPE) for n in weights}
    with ops.record(plan, Arena(0)):
        for n in outputs:
            ops.linear(x, weights[n], out=results[n])

    def run(held: object = (x, weights, results)) -> None:
        plan.run(1, 1, 1)

    return run


def _key(processor: str) -> str:
    """Of the processor, and of what else the choice may depend on."""
    what = [octavo.__version__, processor, _native.isa(), _native.num_threads()]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()


def _read(file: Path) -> Tuning | None:
    """What was chosen before; None: nothing, or nothing that could have been."""
    try:
        tuning = msgspec.json.decode(_read_small(file), type=Tuning)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        logger.debug("%s is written anew: %s", file, error)
        return None
    return tuning if tuning.spin_us in SPINS and tuning.grain in GRAINS else None


def _read_small(file: Path) -> bytes:
    """The bytes of a file, if it may be one that `_write` has written.

    Raises:
        ValueError: it is not.
        OSError: it cannot be read.
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
    """Whether no other process holds the lock; the system unlocks what a dead one had locked."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
