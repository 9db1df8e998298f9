"""Progress of loading a model: a bar in a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.models.weight_cache import Progress

logger = logging.getLogger(__name__)

# Seconds before the bar is shown, and between two log lines.
_PATIENCE = 1.0
_LOG_INTERVAL = 5.0

on_progress: Callable[[str], None] | None = None
"""Callback that replaces bar and log lines, for programs that display the text themselves."""


@contextmanager
def loading_bar(name: str, *, shown: bool = True) -> Iterator[Progress]:
    """Show the progress of loading a model, if that lasts long.

    The bar is tqdm's, which does not hide the cursor, since loading may be interrupted. One of
    several workers shows it; none does if log lines of the level info are disabled.
    """
    if on_progress is not None:
        report = on_progress
        yield lambda done, total: report(_text(name, done, total))
        return
    shown = shown and logger.isEnabledFor(logging.INFO)
    if shown and sys.stderr.isatty():
        with _bar(name) as show:
            yield show
        return
    last = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last
        if shown and time.monotonic() - last >= _LOG_INTERVAL:
            last = time.monotonic()
            logger.info("%s", _text(name, done, total))

    yield log


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from tqdm import tqdm  # a server's start should not wait for it

    with tqdm(
        desc=f"Loading {name}",
        delay=_PATIENCE,
        leave=False,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _text(name: str, done: int, total: int) -> str:
    return f"loading {name}: {done / max(1, total):.0%}"
