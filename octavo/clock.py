"""The clock of all messages: seconds since 1970, which mean something on another host too.

It is set once, when the process starts, and runs as `time.monotonic` does from then on: no deadline
jumps when somebody sets the wall clock. By as much as that one was set between two processes'
starts do their clocks differ; hosts' clocks have to agree as well as deadlines are to.
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
