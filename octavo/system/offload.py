"""Work that would hold up an event loop is done on threads.

A thread helps only if the work lets go of the interpreter's lock: what is written in Python does,
every `SWITCH_INTERVAL` in a server, and so do `Tokenizer.encode` and `decode` for long texts. A
call into another library may keep it, so what such a call can be given is bounded by its callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# In microseconds. Shorter work is done at once: to hand it to a thread and back takes 100 or so.
_LONG = 2_000
_VERY_LONG = 200_000
# Few threads, since the cores are the model's. The longest work is done one by one and has a thread
# of its own: what is merely long does not wait for it.
_long_work = ThreadPoolExecutor(2, "octavo-long-work")
_very_long_work = ThreadPoolExecutor(1, "octavo-very-long-work")


async def offload(
    microseconds: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Calls a function without holding up the event loop.

    Args:
        microseconds: about how long it takes.
        function: is called at once, or on a thread.
        args: its arguments.
        kwargs: its named arguments.
    """
    if microseconds < _LONG:
        return function(*args, **kwargs)
    threads = _long_work if microseconds < _VERY_LONG else _very_long_work
    call = partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)
