"""Memory of a machine's engines that divide experts."""

from __future__ import annotations

import os
import weakref

from octavo.errors import ConfigError


class ExpertMemory:
    """Memories that the engines of this machine share, one for each stage.

    They are anonymous, and are freed with this object and the last engine.

    Args:
        num_stages: number of stages of an engine.

    Raises:
        ConfigError: engines that divide experts do not work on this system.
    """

    def __init__(self, num_stages: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "enable_expert_parallel with data_parallel_size of more than 1 works on Linux "
                "only; leave one of them out."
            )
        self._num_stages = num_stages
        self._all: list[int] = []
        """Descriptors of all memories. They stay open, so that no path ever names another one."""
        self._free = weakref.finalize(self, _close, self._all)
        self.descriptors = self._make()
        """Descriptors of the memories in use, by stage."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the memories in use, for the engines."""
        return tuple(f"/proc/{os.getpid()}/fd/{it}" for it in self.descriptors)

    def renew(self) -> None:
        """Replace the memories, once the engines that use them are killed."""
        for descriptor in self.descriptors:
            os.ftruncate(descriptor, 0)
        self.descriptors = self._make()

    def close(self) -> None:
        """Free the memories. May be called twice."""
        self.descriptors = []
        self._free()

    def _make(self) -> list[int]:
        made = [os.memfd_create("octavo-experts", os.MFD_CLOEXEC) for _ in range(self._num_stages)]
        self._all += made
        return made


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
