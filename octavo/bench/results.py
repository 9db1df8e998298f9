"""Results: JSON files that are written atomically, their metadata, tables, progress bars."""

from __future__ import annotations

import errno
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from octavo import __version__
from octavo.errors import BenchError
from octavo.system.device import cpu_model, num_cpus

_LINE_INTERVAL = 15.0
"""Seconds between lines of progress without a terminal."""


def save_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result; NaN becomes null.

    Raises:
        BenchError: see `save_bytes`.
    """
    save_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def counted(number: int, noun: str) -> str:
    """Return "1 request", "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def save_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically.

    It is written under another name in the same folder (which is created if needed) and renamed.

    Raises:
        BenchError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise BenchError(f"The result cannot be written to {path}: {error.strerror}.") from error


def check_writable(path: str | Path | None) -> None:
    """Check, before anything is measured, that `save_json` can write a file; None is always valid.

    Raises:
        BenchError: the file cannot be written.
    """
    if path is None:
        return
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Missing folders are created when there is a result.
        existing = next(folder for folder in path.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise BenchError(f"The result cannot be written to {path}: {error.strerror}.") from error


def metadata(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of a result: date (UTC), versions, processor, and the arguments.

    Args:
        arguments: such as `vars(args)`; values that JSON does not support (functions) are omitted.
    """
    torch = sys.modules.get("torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "octavo_version": __version__,
        "python_version": platform.python_version(),
        "torch_version": None if torch is None else str(torch.__version__),
        "cpu": cpu_model(),
        "num_cpus": num_cpus(),
        "arguments": {k: _plain(v) for k, v in arguments.items() if _is_plain(v)},
    }


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    desc: str = "",
    disable: bool = False,
) -> tqdm[Any]:
    """Return a progress bar on stderr; without a terminal it writes a line at intervals."""
    if sys.stderr.isatty():
        return tqdm(iterable, total=total, desc=desc, disable=disable)
    return _ProgressLines(
        iterable,
        total=total,
        desc=desc,
        disable=disable,
        delay=_LINE_INTERVAL,
        mininterval=_LINE_INTERVAL,
        miniters=1,
        bar_format="{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left",
    )


class _ProgressLines(tqdm):  # type: ignore[type-arg]
    """Progress bar for logs: writes whole lines, and rewrites none."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write a line."""
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def close(self) -> None:
        """Stop writing, before the result is printed."""
        self.disable = True


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    console: Console | None = None,
) -> None:
    """Print a table; the first column is text, the others are numbers (floats: 4 digits)."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(f"{v:.4g}" if isinstance(v, float) else str(v)) for v in row))
    if console is None:
        # A file or a pipe has no width.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    console.print(table)


def _plain(value: Any) -> Any:
    """Convert infinity, which JSON lacks, to "inf" as vLLM does."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))
