"""Garbage collections, which take time at a start and stop all threads of a server."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collections, which would search the many new objects that stay."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Disable garbage collections while modules are imported; later ones do not search these."""
    with no_garbage_collection():
        yield
        gc.freeze()


def exempt_present_objects() -> None:
    """Exempt all present objects from garbage collections, and collect old objects rarely.

    A collection of old objects visits those of all requests: 200,000 take about 50 ms. It comes
    after 7,000,000 new objects instead of 70,000. Meanwhile the objects of a large request have
    been freed, since they are in no cycles. Collections of young objects come as often as usual.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 1000)
