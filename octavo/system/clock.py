"""The clock of all messages: seconds since 1970, which mean something on another host too.

It is set once, when the process starts, and runs as `time.monotonic` does from then on: no deadline
jumps when somebody sets the wall clock. An engine process, which may start days later, is given its
parent's; two hosts differ by as much as their wall clocks do.
"""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def epoch() -> float:
    """The time at second 0 of `time.monotonic`, which all processes of a host share."""
    return _EPOCH


def set_epoch(seconds: float) -> None:
    """Makes this clock that of the process whose `epoch` is given."""
    global _EPOCH
    _EPOCH = seconds


def now() -> float:
    """The time."""
    return time.monotonic() + _EPOCH


def from_monotonic(seconds: float) -> float:
    """The time at a second of this process' `time.monotonic`."""
    return seconds + _EPOCH


def to_monotonic(seconds: float) -> float:
    """The second of this process' `time.monotonic` at a time."""
    return seconds - _EPOCH
