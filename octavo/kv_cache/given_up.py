"""Log of what the prefix cache has given up lately, for `explain`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

MAX_ENTRIES = 4096


class GivenUp(NamedTuple):
    """Known block, or snapshot of a state, that made room for something else."""

    time: float
    by: str | None
    """Request that got the block; None: a snapshot of some request."""


class GivenUpLog:
    """Bounded log by hash; the oldest entries are dropped.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, GivenUp] = OrderedDict()

    def note(self, block_hash: bytes, by: str | None) -> None:
        """Note that a block or snapshot with this hash was given up for a request."""
        self._found.pop(block_hash, None)
        self._found[block_hash] = GivenUp(self._clock(), by)
        if len(self._found) > MAX_ENTRIES:
            self._found.popitem(last=False)

    def find(self, block_hash: bytes) -> GivenUp | None:
        """Return the last time that a hash was given up; None: not lately."""
        return self._found.get(block_hash)
