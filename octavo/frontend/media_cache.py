"""Cache of processed media, which finds them by their files or their `uuid`.

A file that comes again is not decoded and processed again, and media with a `uuid` need not be sent
again. vLLM's cache of processed media has the same size setting. A key finds an item only in the
scope of the prefix cache in which the item was sent: no client finds the media of another API key,
changes them, or sees by the time of an answer that they were sent. It finds the encoder's input,
whose digest is still the identity of the item.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

from octavo.scheduler.fairness import Tenant

# Bytes of an entry besides its item.
_ENTRY = 1024


@dataclass(frozen=True)
class MediaKey:
    """Key of an item."""

    scope: str | None
    """Scope of the prefix cache."""
    name: str | bytes
    """The uuid that the client gives to the item; or, as bytes, the SHA-256 of its file."""
    form: str
    """Modality, and settings of the processor, as text."""


class MediaCache:
    """Cache of items within a number of bytes; threads may share it.

    If there is no room, the tenant that holds most bytes gives up the item that it has not used for
    the longest time.

    Args:
        max_nbytes: most bytes of all items; 0: it keeps none.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        """Bytes of all items."""
        self._lock = threading.Lock()
        self._items: dict[MediaKey, tuple[Any, int, Tenant]] = {}
        """Each item, its bytes, and the tenant that holds it."""
        self._order: defaultdict[Tenant, OrderedDict[MediaKey, None]] = defaultdict(OrderedDict)
        """Items of each tenant, those unused for the longest time first."""
        self._held = Counter[Tenant]()
        """Bytes of each tenant."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: MediaKey) -> Any:
        """Return an item; None: it is not in the cache."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._order[found[2]].move_to_end(key)
            return found[0]

    def put(self, key: MediaKey, item: Any, nbytes: int, tenant: Tenant) -> None:
        """Keep an item in place of the one with this key; one that never fits is not kept.

        Args:
            key: its key.
            item: the item.
            nbytes: its bytes.
            tenant: sender of the item.
        """
        nbytes += _ENTRY
        with self._lock:
            self._drop(key)
            if nbytes > self.max_nbytes:
                return
            self._items[key] = item, nbytes, tenant
            self._order[tenant][key] = None
            self._held[tenant] += nbytes
            self.nbytes += nbytes
            while self.nbytes > self.max_nbytes:
                largest = max(self._held, key=self._held.__getitem__)
                self._drop(next(iter(self._order[largest])))

    def clear(self) -> None:
        """Give up all items."""
        with self._lock:
            self._items.clear()
            self._order.clear()
            self._held.clear()
            self.nbytes = 0

    def _drop(self, key: MediaKey) -> None:
        if key not in self._items:
            return
        _, nbytes, tenant = self._items.pop(key)
        del self._order[tenant][key]
        self._held[tenant] -= nbytes
        if not self._order[tenant]:
            del self._order[tenant], self._held[tenant]
        self.nbytes -= nbytes
