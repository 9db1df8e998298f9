"""Threads for work that would block an event loop.

A thread only helps if the work releases the interpreter's lock. Python code does, every
`SWITCH_INTERVAL` in a server, and so do `Tokenizer.encode` and `decode` for long texts. A call of
another library may keep it, so callers must bound the inputs of such calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# In microseconds. Shorter work runs at once: a round trip to a thread takes about 100.
_LONG = 2_000
_VERY_LONG = 200_000
# Entries of a list.
_PIECE = 2**15
# Few threads, since the model uses the cores. A separate thread runs the longest work, one piece at
# a time: merely long work does not wait for it.
_long_work = ThreadPoolExecutor(2, "octavo-long-work")
_very_long_work = ThreadPoolExecutor(1, "octavo-very-long-work")


def pieces(values: list[T]) -> Iterator[list[T]]:
    """Yield a list in pieces, each of which a call such as `max` reads within a millisecond.

    Such a call keeps the interpreter's lock. Other threads may run between two pieces.
    """
    for begin in range(0, len(values), _PIECE):
        yield values[begin : begin + _PIECE]


async def offload(
    microseconds: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function without blocking the event loop.

    Args:
        microseconds: approximate duration.
        function: called at once, or on a thread.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if microseconds < _LONG:
        return function(*args, **kwargs)
    threads = _long_work if microseconds < _VERY_LONG else _very_long_work
    call = partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)
