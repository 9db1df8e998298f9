"""Servers that have what the clients of a router name: stored objects, and media with a uuid."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

S = TypeVar("S")

MAX_NAMES = 2**16
"""Maximum number of remembered names: some 20 MB."""


class Homes(Generic[S]):
    """Record of the servers, of type S, that have something, for each API key.

    Beyond its bound, the oldest name of the key with most names is dropped.
    """

    def __init__(self) -> None:
        self._homes: dict[str | None, OrderedDict[str, S]] = {}
        self._size = 0

    def note(self, api_key: str | None, name: str, upstream: S) -> None:
        """Remember the server of a name.

        Args:
            api_key: key of the client to which it belongs.
            name: id of a response or conversation, or a name of `octavo.router.media`.
            upstream: the server.
        """
        homes = self._homes.setdefault(api_key, OrderedDict())
        self._size += name not in homes
        homes[name] = upstream
        homes.move_to_end(name)
        if self._size > MAX_NAMES:
            max(self._homes.values(), key=len).popitem(last=False)
            self._size -= 1

    def find(self, api_key: str | None, name: str) -> S | None:
        """Return the server of a name; None if it is unknown for this key."""
        homes = self._homes.get(api_key)
        return None if homes is None else homes.get(name)
