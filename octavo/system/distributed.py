"""Processes of one host that compute one model together, and the memory that they share. No torch.

Linear layers are split by their outputs, so each number is still summed by one process in the one
order: however many there are, the bits are those of one process. What a next layer reads whole lies
in shared memory, of which each writes its part; barriers lie between writing and reading.

Layers are divided among stages, each of so many processes. Counters in the same memory say how far
somebody has come: a stage with what it hands to the next one, or who samples with the tokens.
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
"""`SharedBarrier` in csrc/barrier.h."""
COUNTER_NBYTES = 128
"""`SharedCounter` there."""

BARRIER_TIMEOUT = 60.0
"""Seconds that a process waits for the others before it takes one of them for dead."""
STAGE_TIMEOUT = 3600.0
"""The same where it waits for all that another stage computes in a step."""


@dataclass(frozen=True)
class Rank:
    """One of the processes."""

    index: int = 0
    """From 0 on, among those that compute the same layers together."""
    size: int = 1
    """How many these are."""
    stage: int = 0
    """Which part of the layers is theirs."""
    num_stages: int = 1
    reduces: bool = False
    """Whether output projections are split by their inputs, and what the processes of a stage have
    computed is summed in their order; otherwise by their outputs, each of which one process sums.
    """
    splits_rows: bool = False
    """Whether norms, and the sums before them, are computed of every `size`-th row by each process,
    and put together behind the norm."""

    @classmethod
    def of(cls, number: int, device: DeviceConfig) -> Rank:
        """The process with that number: those of a stage follow one another."""
        size, num_stages = device.tensor_parallel_size, device.pipeline_parallel_size
        reduces = device.tensor_parallel_mode == "reduce" and size > 1
        splits = device.enable_sequence_parallel
        return cls(number % size, size, number // size, num_stages, reduces, splits)

    @property
    def number(self) -> int:
        """Its number among all."""
        return self.stage * self.size + self.index

    @property
    def world_size(self) -> int:
        """How many processes there are in all."""
        return self.size * self.num_stages

    @property
    def is_first(self) -> bool:
        """Whether it has the first layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last layers and a part of the LM head."""
        return self.stage == self.num_stages - 1

    @property
    def drafts(self) -> bool:
        """Whether it is the one that drafts."""
        return self.index == 0 and self.is_first

    @property
    def samples(self) -> bool:
        """Whether it is the one that samples."""
        return self.index == 0 and self.is_last

    def share(self, n: int) -> tuple[int, int]:
        """Its part of n outputs, from ... to ...; no other's is larger than rank 0's."""
        each, more = divmod(n, self.size)
        begin = self.index * each + min(self.index, more)
        return begin, begin + each + (self.index < more)


ALONE = Rank()


class GroupMemory:
    """Memory of all processes that compute one model, and the barriers and counters in it.

    It has no name in the system: who is to have it inherits the descriptor, and it is gone with
    the last process that does.

    Args:
        descriptor: what `create` made; stays the caller's.
        nbytes: as `create` was given.
        rank: of this process.
        timeout: seconds that a barrier waits at most.

    Raises:
        ConfigError: what the descriptor leads to has not that size.
    """

    def __init__(
        self, descriptor: int, nbytes: int, rank: Rank, timeout: float = BARRIER_TIMEOUT
    ) -> None:
        from octavo import _native  # memory is planned without it

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
        """Of the stage's."""
        self._rank = rank
        self._native = _native
        self._timeout = timeout

    @staticmethod
    def create(nbytes: int, num_stages: int = 1) -> int:
        """Makes zeroed memory of so many bytes beside the header; returns its descriptor.

        Raises:
            ConfigError: on systems that have no such memory.
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
    def end(descriptor: int, num_stages: int) -> None:
        """Has who waits in the memory behind a descriptor, now or later, end with an error."""
        from octavo import _native

        header = np.frombuffer(mmap.mmap(descriptor, _header_nbytes(num_stages)), np.uint8)
        for stage in range(num_stages):
            _native.break_group(header.ctypes.data + stage * _BARRIER_NBYTES)

    @property
    def data(self) -> NDArray[np.uint8]:
        """uint8 [nbytes], the same for all."""
        return self._bytes[self._header :]

    def barrier(self) -> None:
        """Waits until all of the stage have come here; while a plan records, it is noted there.

        Raises:
            GroupError: `octavo._native`'s, also when a plan runs: another process has failed, or
                did not come in time.
        """
        self._native.shared_barrier(
            barrier=self.barrier_address, ranks=self._rank.size, timeout=self._timeout
        )

    def break_(self) -> None:
        """Has all waiting end, now and later, with an error: this process, or another, is lost."""
        for barrier in self._barriers:
            self._native.break_group(barrier)

    @property
    def broken(self) -> bool:
        """Whether somebody has called `break_`, or waited in vain."""
        return self._native.group_broken(self.barrier_address)

    def counter(self, begin: int) -> Counter:
        """The counter in the `COUNTER_NBYTES` bytes from there on."""
        assert begin % 64 == 0
        return Counter(self, begin)


class Counter:
    """How far one process has come, for others to wait for; from 0 on, and beyond 32 bits.

    Args:
        memory: whose data has it.
        begin: its first byte there.
    """

    def __init__(self, memory: GroupMemory, begin: int) -> None:
        from octavo import _native

        self._memory = memory
        self._native = _native
        self._address: int = memory.data.ctypes.data + begin

    def post(self, value: int) -> None:
        """Says that it has come to a value; what was written before can be read by who knows."""
        self._native.counter_post(self._address, value & 0xFFFFFFFF)

    def reached(self, value: int) -> bool:
        """Whether it has come there."""
        return self._native.counter_reached(self._address, value & 0xFFFFFFFF)

    def wait(self, value: int, timeout: float = STAGE_TIMEOUT) -> None:
        """Waits until it has, for so many seconds at most.

        Raises:
            GroupError: as `GroupMemory.barrier`.
        """
        self._native.counter_wait(
            counter=self._address,
            value=value & 0xFFFFFFFF,
            barrier=self._memory.barrier_address,
            timeout=timeout,
        )


def _header_nbytes(num_stages: int) -> int:
    """Whole pages for the barriers of all stages."""
    return -(-num_stages * _BARRIER_NBYTES // _PAGE) * _PAGE


def group_failure(error: BaseException) -> EngineDeadError:
    """What a failure in one process of a group means: the others cannot know how far it came."""
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"a process of the group failed: {type(error).__name__}: {error}")
