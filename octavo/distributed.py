"""Processes of one host that compute one model together, and the memory that they share. No torch.

Linear layers are split by their outputs, so each number is still summed by one process in the one
order: however many there are, the bits are those of one process. What a next layer reads whole lies
in shared memory, of which each writes its part; barriers lie between writing and reading.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, EngineDeadError

HEADER_NBYTES = 4096
"""A page for the barrier: `SharedBarrier` in csrc/barrier.h."""

BARRIER_TIMEOUT = 60.0
"""Seconds that a process waits for the others before it takes one of them for dead."""


@dataclass(frozen=True)
class Rank:
    """One of the processes."""

    index: int = 0
    """From 0 on; that one samples."""
    size: int = 1
    """How many there are."""

    def share(self, n: int) -> tuple[int, int]:
        """Its part of n outputs, from ... to ...; no other's is larger than rank 0's."""
        each, more = divmod(n, self.size)
        begin = self.index * each + min(self.index, more)
        return begin, begin + each + (self.index < more)


ALONE = Rank()


class GroupMemory:
    """Memory of all processes of a group, and the barrier in it.

    It has no name in the system: who is to have it inherits the descriptor, and it is gone with
    the last process that does.

    Args:
        descriptor: what `create` made; stays the caller's.
        nbytes: as `create` was given.
        ranks: processes of the group.
        timeout: seconds that a barrier waits at most.

    Raises:
        ConfigError: what the descriptor leads to has not that size.
    """

    def __init__(
        self, descriptor: int, nbytes: int, ranks: int, timeout: float = BARRIER_TIMEOUT
    ) -> None:
        from octavo import _native  # memory is planned without it

        if os.fstat(descriptor).st_size != HEADER_NBYTES + nbytes:
            raise ConfigError(
                f"The group's memory has {os.fstat(descriptor).st_size} bytes instead of "
                f"{HEADER_NBYTES + nbytes}: its processes do not compute the same model."
            )
        self._bytes: NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(descriptor, HEADER_NBYTES + nbytes), np.uint8
        )
        self.barrier_address: int = self._bytes.ctypes.data
        self.ranks = ranks
        self._native = _native
        self._timeout = timeout

    @staticmethod
    def create(nbytes: int) -> int:
        """Makes zeroed memory of so many bytes beside the header; returns its descriptor.

        Raises:
            ConfigError: on systems that have no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "tensor_parallel_size of more than 1 works on Linux only; leave it out."
            )
        descriptor = os.memfd_create("octavo-group", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, HEADER_NBYTES + nbytes)
        return descriptor

    @property
    def data(self) -> NDArray[np.uint8]:
        """uint8 [nbytes], the same for all."""
        return self._bytes[HEADER_NBYTES:]

    def barrier(self) -> None:
        """Waits until all have come here; while a plan records, it is noted there.

        Raises:
            GroupError: `octavo._native`'s, also when a plan runs: another process has failed, or
                did not come in time.
        """
        self._native.shared_barrier(
            barrier=self.barrier_address, ranks=self.ranks, timeout=self._timeout
        )

    def break_(self) -> None:
        """Has all waiting end, now and later, with an error: this process, or another, is lost."""
        self._native.break_group(self.barrier_address)

    @property
    def broken(self) -> bool:
        """Whether somebody has called `break_`, or waited in vain."""
        return self._native.group_broken(self.barrier_address)


def group_failure(error: BaseException) -> EngineDeadError:
    """What a failure in one process of a group means: the others cannot know how far it came."""
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(
        f"a process of the tensor-parallel group failed: {type(error).__name__}: {error}"
    )
