"""Places for work that waits for a machine, given to tenants in turns."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

_NOBODY = object()  # None can be a tenant


class FairSlots:
    """Semaphore whose free places go to waiting tenants in turns, to each tenant's tasks in order.

    All methods belong to one event loop.

    Args:
        count: number of places.
        most: most places that one tenant holds at a time; None: all of them.
    """

    def __init__(self, count: int, most: int | None = None) -> None:
        self._free, self._most = count, most or count
        self._held: Counter[Hashable] = Counter()
        """Number of places of each tenant that holds some."""
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Tasks that wait, by tenant; the first tenant that may hold another place is next."""

    @asynccontextmanager
    async def hold(self, tenant: Hashable) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        if self._may_hold(tenant):
            self._take(tenant)
        else:
            place = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(place)
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():  # it was given one meanwhile
                    self._release(tenant)
                raise
        try:
            yield
        finally:
            self._release(tenant)

    def _may_hold(self, tenant: Hashable) -> bool:
        return self._free > 0 and self._held[tenant] < self._most

    def _take(self, tenant: Hashable) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _release(self, tenant: Hashable) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        if tenant in self._waiting:  # it has just had a turn
            self._waiting[tenant] = self._waiting.pop(tenant)
        while (following := next(filter(self._may_hold, self._waiting), _NOBODY)) is not _NOBODY:
            tasks = self._waiting.pop(following)
            place = tasks.popleft()
            if tasks:
                self._waiting[following] = tasks
            if not place.cancelled():
                self._take(following)
                place.set_result(None)
