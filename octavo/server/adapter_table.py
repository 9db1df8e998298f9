"""Table of the adapters that a server offers as models; all of its front ends share it.

The table is a SQLite database: a file in the private folder of the run for several processes, or
memory for one. A change is a transaction, and each lookup reads the table. So all front ends know
an adapter as soon as one has added it, and a front end that is replaced, or a model that is loaded
again, finds it. The file is deleted with its folder.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from octavo.config import LoRAConfig
from octavo.messages import AdapterRef
from octavo.server.errors import UnavailableError

FILE_VARIABLE = "OCTAVO_ADAPTER_TABLE"
"""Environment variable with the file that the front of several models has made for a server."""
MAX_ADAPTERS = 10_000
"""Most adapters of a server."""
# Most seconds in which another process may hold the lock of the table: it does for microseconds,
# unless a signal stops it.
_LOCK_SECONDS = 2.0
# Pages of 4 KiB of the log of changes, after which it begins anew.
_LOG_PAGES = 64
_CREATE = "CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, data BLOB NOT NULL)"
# SQLite's name of the row number has the order of addition, which a replacement keeps.
_ORDER = "ORDER BY rowid"


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter that requests may name as their model."""

    name: str
    path: str
    """Folder, file or hub id."""
    draft_path: str | None = None
    """Folder, file or hub id of the draft model's adapter; None: it drafts without one."""
    root: str | None = None
    """Folder that must contain its files; None: they may be anywhere."""
    parent: str
    """Name of its model."""
    ref: AdapterRef | None = None
    """The checked adapter; None: the model's files are not known yet."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    """Time of its addition in seconds since 1970."""


class AdapterTable:
    """Adapters of a server, by name.

    All methods raise `UnavailableError` if the table cannot be read or changed.

    Args:
        path: the file, which is created if necessary; None: the memory of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        with _errors():
            self._database = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=_LOCK_SECONDS,
                isolation_level=None,  # each statement is a transaction
            )
            # Readers never wait for a writer. The file need not outlive the machine.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            self._database.execute(_CREATE)

    def close(self) -> None:
        """Close the file. It may be called twice."""
        self._database.close()

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Iterate over the adapters, in the order in which they were added."""
        with _errors():
            rows = self._database.execute(f"SELECT data FROM adapters {_ORDER}").fetchall()
        return (_decode(data) for (data,) in rows)

    def __len__(self) -> int:
        """Return the number of adapters."""
        with _errors():
            (count,) = self._database.execute("SELECT count(*) FROM adapters").fetchone()
        return int(count)

    def names(self, most: int = -1) -> list[str]:
        """Return the names of the adapters that were added first: all, or at most `most`."""
        with _errors():
            rows = self._database.execute(f"SELECT name FROM adapters {_ORDER} LIMIT ?", (most,))
            return [name for (name,) in rows]

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter with a name, or None if no adapter has it."""
        try:
            name.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            return None
        with _errors():
            found = self._database.execute("SELECT data FROM adapters WHERE name = ?", (name,))
            row = found.fetchone()
        return None if row is None else _decode(row[0])

    def add(self, adapter: ServedAdapter, *, replace: bool = False) -> bool:
        """Add an adapter.

        Args:
            adapter: the adapter.
            replace: True to replace one with the same name.

        Returns:
            False if the name exists and is not replaced, or the table is full.
        """
        then = "UPDATE SET data = excluded.data" if replace else "NOTHING"
        with _errors():
            done = self._database.execute(
                "INSERT INTO adapters SELECT ?, ? WHERE (SELECT count(*) FROM adapters) < ?"
                " OR EXISTS (SELECT * FROM adapters WHERE name = ?)"
                f" ON CONFLICT (name) DO {then}",
                (adapter.name, _encode(adapter), MAX_ADAPTERS, adapter.name),
            )
        return done.rowcount > 0

    def exchange(self, old: ServedAdapter, new: ServedAdapter) -> bool:
        """Replace an adapter by one with the same name; False: it has changed meanwhile."""
        with _errors():
            done = self._database.execute(
                "UPDATE adapters SET data = ? WHERE name = ? AND data = ?",
                (_encode(new), old.name, _encode(old)),
            )
        return done.rowcount > 0

    def remove(self, name: str) -> bool:
        """Remove an adapter; return False if no adapter has this name."""
        with _errors():
            done = self._database.execute("DELETE FROM adapters WHERE name = ?", (name,))
        return done.rowcount > 0


def make_table(config: LoRAConfig, parent: str, path: Path | None = None) -> AdapterTable:
    """Return a new table with the adapters of the settings, which are not checked yet.

    Args:
        config: settings of adapters.
        parent: name of the served model.
        path: see `AdapterTable`.
    """
    table = AdapterTable(path)
    for it in config.modules:
        table.add(
            ServedAdapter(
                name=it.name,
                path=it.path,
                draft_path=it.draft_path,
                parent=it.base_model_name or parent,
            )
        )
    return table


def given_file() -> Path | None:
    """Return the file that the process above this one has made; None: it has made none."""
    name = os.environ.get(FILE_VARIABLE)
    return None if name is None else Path(name)


_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(ServedAdapter)


def _decode(data: bytes) -> ServedAdapter:
    return _decoder.decode(data)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise UnavailableError(
            f"The table of adapters cannot be used now ({error}); try again later."
        ) from error
