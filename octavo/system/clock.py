"""Clock of all messages: seconds since 1970, which are meaningful on other hosts, too.

It is set once, when the process starts, and then advances like `time.monotonic`: changes of the
wall clock do not move deadlines. An engine process, which may start days later, receives its
parent's clock. Clocks of two hosts differ by the difference of their wall clocks.
"""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def epoch() -> float:
    """Return the time at second 0 of `time.monotonic`, which all processes of a host share."""
    return _EPOCH


def set_epoch(seconds: float) -> None:
    """Set this clock to that of the process with the given `epoch`."""
    global _EPOCH
    _EPOCH = seconds


def now() -> float:
    """Return the time."""
    return time.monotonic() + _EPOCH


def from_monotonic(seconds: float) -> float:
    """Convert a second of this process' `time.monotonic` to a time."""
    return seconds + _EPOCH


def to_monotonic(seconds: float) -> float:
    """Convert a time to a second of this process' `time.monotonic`."""
    return seconds - _EPOCH
