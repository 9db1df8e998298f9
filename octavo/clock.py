"""The clock of all messages: seconds since 1970, which mean something on another host too.

It is set once, when the process starts, and runs as `time.monotonic` does from then on: no deadline
jumps when somebody sets the wall clock. Two processes differ by as much as it was set between their
starts, two hosts by as much as their wall clocks do.
"""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """The time."""
    return time.monotonic() + _EPOCH


def from_monotonic(seconds: float) -> float:
    """The time at a second of this process' `time.monotonic`."""
    return seconds + _EPOCH


def to_monotonic(seconds: float) -> float:
    """The second of this process' `time.monotonic` at a time."""
    return seconds - _EPOCH
