"""The progress bar of a model that takes long to load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from octavo.models.weight_cache import Progress

# Seconds before it is shown.
_PATIENCE = 1.0


@contextmanager
def loading_bar(name: str, *, shown: bool = True) -> Iterator[Progress]:
    """Shows on stderr how much of a model is loaded, where that is a terminal and takes long.

    It is tqdm's, which leaves the cursor alone: loading may be ended at any moment. Of several
    workers one shows it.
    """
    with tqdm(
        desc=f"Loading {name}",
        delay=_PATIENCE,
        leave=False,
        disable=None if shown else True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
