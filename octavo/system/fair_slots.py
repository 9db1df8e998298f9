"""Places for work that waits for a machine, given to tenants in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairSlots:
    """Semaphore whose free places go to waiting tenants in turns, to each tenant's tasks in order.

    All methods belong to one event loop.

    Args:
        count: number of places.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Tasks that wait, by tenant; the first tenant is next. Empty while a place is free."""

    @asynccontextmanager
    async def hold(self, tenant: Hashable) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        if self._free:
            self._free -= 1
        else:
            place = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(place)
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():  # it was given one meanwhile
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            tasks = self._waiting.pop(tenant)
            place = tasks.popleft()
            if tasks:
                self._waiting[tenant] = tasks
            if not place.cancelled():
                place.set_result(None)
                return
        self._free += 1
