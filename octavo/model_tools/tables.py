"""Tables of the tools' output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.plan.memory_plan import MIB
from octavo.terminal.screen import harmless


def make_console() -> Console:
    """Return the console of standard output; a file or a pipe, which has no width, gets 100."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def print_pairs(console: Console, title: str, pairs: Mapping[str, str]) -> None:
    """Print a title, and a line for each name and its value."""
    table = make_table(title, ("", ""), 2)
    table.show_header = False
    for name, value in pairs.items():
        table.add_row(f"  {name}", Text(harmless(value)))
    console.print(table)


def make_table(title: str, columns: Sequence[str], left: int) -> Table:
    """Return a table whose first `left` columns are text, and the others numbers."""
    table = Table(title=Text(title, "bold"), title_justify="left", box=None)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def mib(nbytes: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{nbytes / MIB:,.1f} MiB"
