"""Processes of one host that compute one model together, and their shared memory.

Linear layers are split by their outputs, so each number is still summed by one process in the same
order: with any number of processes, the bits are those of one process. Inputs that a next layer
reads whole are in shared memory, of which each process writes a part; barriers separate writing and
reading.

Layers are divided among stages, each with the same number of processes. Counters in the same memory
report progress: that of a stage with its outputs for the next stage, or of the sampling process
with the tokens.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from octavo.config import DeviceConfig

_PAGE = 4096
_BARRIER_NBYTES = 256
"""Size of `SharedBarrier` in csrc/barrier.h."""
COUNTER_NBYTES = 128
"""Size of `SharedCounter` in csrc/barrier.h."""
CACHE_LINE = 64
"""Alignment of every part of the shared memory, in bytes."""

BARRIER_TIMEOUT = 60.0
"""Seconds that a process waits for the others before it considers one of them dead."""
STAGE_TIMEOUT = 3600.0
"""Seconds that a process waits for a whole step of another stage."""


@dataclass(frozen=True)
class Rank:
    """Position of one of the processes."""

    index: int = 0
    """Index, from 0 on, among the processes that compute the same layers together."""
    size: int = 1
    """Number of processes of a stage."""
    stage: int = 0
    """Index of the stage."""
    num_stages: int = 1
    reduces: bool = False
    """True if output projections are split by their inputs, and the results of a stage's processes
    are summed in order; otherwise they are split by their outputs, each summed by one process.
    """
    splits_rows: bool = False
    """True if each process computes the norms, and the sums before them, of every `size`-th row,
    and the rows are collected after the norm."""
    splits_experts: bool = False
    """True if each process computes some experts as a whole; otherwise it computes some columns of
    all."""
    redundant_experts: int = 0
    """Number of copies of a layer's experts that there are in addition to the experts."""

    @classmethod
    def of(cls, number: int, device: DeviceConfig) -> Rank:
        """Return the rank of process `number`; numbers of a stage are successive."""
        size, num_stages = device.tensor_parallel_size, device.pipeline_parallel_size
        reduces = device.tensor_parallel_mode == "reduce" and size > 1
        return cls(
            number % size,
            size,
            number // size,
            num_stages,
            reduces,
            splits_rows=device.enable_sequence_parallel,
            splits_experts=device.enable_expert_parallel,
            redundant_experts=device.redundant_experts,
        )

    @property
    def number(self) -> int:
        """Index among all processes."""
        return self.stage * self.size + self.index

    @property
    def world_size(self) -> int:
        """Number of processes in all."""
        return self.size * self.num_stages

    @property
    def is_first(self) -> bool:
        """True if it has the first layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if it has the last layers and a part of the LM head."""
        return self.stage == self.num_stages - 1

    @property
    def drafts(self) -> bool:
        """True if it makes the drafts."""
        return self.index == 0 and self.is_first

    @property
    def samples(self) -> bool:
        """True if it samples."""
        return self.index == 0 and self.is_last

    def share(self, n: int) -> tuple[int, int]:
        """Return the range of its part of n outputs; no part is larger than rank 0's."""
        each, more = divmod(n, self.size)
        begin = self.index * each + min(self.index, more)
        return begin, begin + each + (self.index < more)

    def experts(self, n: int) -> tuple[int, ...]:
        """Return the experts of n that the rank has at first in a layer, in ascending order.

        Copies of the first experts follow the last expert. If there are copies, experts and copies
        are divided evenly.
        """
        begin, end = self.share(n + self.redundant_experts)
        return tuple(sorted(expert % n for expert in range(begin, end)))


ALONE = Rank()


class GroupMemory:
    """Memory of all processes that compute one model, with barriers and counters.

    It is anonymous: processes inherit the descriptor, and the memory is freed with the last of
    them.

    Args:
        descriptor: descriptor made by `create`; the caller keeps its ownership.
        nbytes: size given to `create`.
        rank: rank of this process.
        timeout: maximum wait at a barrier in seconds.

    Raises:
        ConfigError: the memory has another size.
    """

    def __init__(
        self, descriptor: int, nbytes: int, rank: Rank, timeout: float = BARRIER_TIMEOUT
    ) -> None:
        from octavo import _native  # the memory plan does not need it

        header = _header_nbytes(rank.num_stages)
        if os.fstat(descriptor).st_size != header + nbytes:
            raise ConfigError(
                f"The group's memory has {os.fstat(descriptor).st_size} bytes instead of "
                f"{header + nbytes}: its processes do not compute the same model."
            )
        self._bytes: NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(descriptor, header + nbytes), np.uint8
        )
        self._header = header
        self._barriers = [
            self._bytes.ctypes.data + stage * _BARRIER_NBYTES for stage in range(rank.num_stages)
        ]
        self.barrier_address: int = self._barriers[rank.stage]
        """Address of the stage's barrier."""
        self._rank = rank
        self._native = _native
        self._timeout = timeout
        self.arrivals: Counter | None = None
        """Counter of this process's arrivals at the barrier, if they are counted."""

    @staticmethod
    def create(nbytes: int, num_stages: int = 1) -> int:
        """Make zeroed memory of `nbytes` bytes plus a header; return its descriptor.

        Raises:
            ConfigError: the system does not support such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "tensor_parallel_size or pipeline_parallel_size of more than 1 works on Linux "
                "only; leave it out."
            )
        descriptor = os.memfd_create("octavo-group", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _header_nbytes(num_stages) + nbytes)
        return descriptor

    @staticmethod
    def size(nbytes: int, num_stages: int = 1) -> int:
        """Return the size of the memory with its header."""
        return _header_nbytes(num_stages) + nbytes

    @staticmethod
    def end(descriptor: int, num_stages: int) -> None:
        """End all present and future waiting in the memory of a descriptor with an error."""
        from octavo import _native

        header = np.frombuffer(mmap.mmap(descriptor, _header_nbytes(num_stages)), np.uint8)
        for stage in range(num_stages):
            _native.break_group(header.ctypes.data + stage * _BARRIER_NBYTES)

    @property
    def data(self) -> NDArray[np.uint8]:
        """Shared data: uint8 [nbytes]."""
        return self._bytes[self._header :]

    def barrier(self) -> None:
        """Wait until all processes of the stage arrive; while a plan records, record the barrier.

        Raises:
            GroupError: of `octavo._native`, also when a plan runs: another process has failed, or
                did not arrive in time.
        """
        self._native.shared_barrier(
            barrier=self.barrier_address,
            arrivals=0 if self.arrivals is None else self.arrivals.address,
            ranks=self._rank.size,
            timeout=self._timeout,
        )

    def break_(self) -> None:
        """End all present and future waiting with an error: this process, or another, is lost."""
        for barrier in self._barriers:
            self._native.break_group(barrier)

    @property
    def broken(self) -> bool:
        """True after `break_` or a timeout in any process."""
        return self._native.group_broken(self.barrier_address)

    def counter(self, begin: int) -> Counter:
        """Return the counter in the `COUNTER_NBYTES` bytes from `begin` on."""
        assert begin % 64 == 0
        return Counter(self, begin)


def aligned(nbytes: int) -> int:
    """Return a size in bytes rounded up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


class Counter:
    """Counter of one process's progress; the other processes wait until it reaches a value.

    It starts at 0. Values may exceed 32 bits: only differences of recent values are compared.

    Args:
        memory: memory that contains the counter.
        begin: offset of the counter.
    """

    def __init__(self, memory: GroupMemory, begin: int) -> None:
        from octavo import _native

        self._memory = memory
        self._native = _native
        self.address: int = memory.data.ctypes.data + begin

    def post(self, value: int) -> None:
        """Set the value; earlier writes are visible to processes that read it."""
        self._native.counter_post(self.address, value & 0xFFFFFFFF)

    @property
    def value(self) -> int:
        """The value, modulo 2**32."""
        return self._native.counter_value(self.address)

    def reached(self, value: int) -> bool:
        """Return True if the counter has reached a value."""
        return self._native.counter_reached(self.address, value & 0xFFFFFFFF)

    def wait(self, value: int, timeout: float = STAGE_TIMEOUT) -> None:
        """Wait until the counter has reached a value, for at most `timeout` seconds.

        Raises:
            GroupError: another process has failed, or the value is not reached in time.
        """
        self._native.counter_wait(
            counter=self.address,
            value=value & 0xFFFFFFFF,
            barrier=self._memory.barrier_address,
            timeout=timeout,
        )


def _header_nbytes(num_stages: int) -> int:
    """Return the bytes of whole pages for the barriers of all stages."""
    return -(-num_stages * _BARRIER_NBYTES // _PAGE) * _PAGE


def group_failure(error: BaseException) -> EngineDeadError:
    """Return the error for a failure in one process of a group: the others' state is unknown."""
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"a process of the group failed: {type(error).__name__}: {error}")
