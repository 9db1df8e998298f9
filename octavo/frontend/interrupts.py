"""Ctrl-C delayed to a moment when it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Ctrl-C that has not been raised yet."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._last: tuple[int, FrameType | None] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a Ctrl-C, as the temporary handler; raise a second one at once."""
        if self._last is not None:
            self._handler(number, frame)
        self._last = number, frame

    def raise_now(self) -> None:
        """Raise the noted Ctrl-C."""
        last, self._last = self._last, None
        if last is not None:
            self._handler(*last)


@contextmanager
def late_interrupts() -> Iterator[Interrupts]:
    """Delay Ctrl-C to the block's end, or to a `raise_now` in the block.

    Elsewhere it could interrupt the engine within a change of its state.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield Interrupts(lambda *_: None)
        return
    interrupts = Interrupts(before)
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        interrupts.raise_now()
