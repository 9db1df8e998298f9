"""Places for work that waits for a machine, given to tenants in turns."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager

_STAY_SECONDS = 0.1
_PAUSE_SECONDS = 0.02
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


class FairShares:
    """Limit of the tasks that tenants have at the same time: none has many more than another one.

    A tenant that is present alone begins any number of tasks. Beside others it begins a task while
    it has fewer than `multiple` times the tasks of the one that has the fewest, or of one with a
    single task, and one task every `_PAUSE_SECONDS` beyond these. So a tenant with little work
    meets few tasks of the others. Tenants with much work hardly limit each other, nor are long
    tasks, which gain from each other's company, limited much. A tenant is still present for a
    while after its work, so that its next piece of work does not meet all that the others have
    begun meanwhile. The tasks of an absent tenant limit no other tenant.

    Tasks of the same tenant begin in order. Those that have waited begin one by one, in different
    rounds of the event loop, which does other work between them. All methods belong to one event
    loop.

    Args:
        multiple: see above.
        seconds: time for which a tenant is still present after its work.
    """

    def __init__(self, multiple: int, seconds: float = _STAY_SECONDS) -> None:
        self._multiple, self._seconds = multiple, seconds
        self._present: Counter[Hashable] = Counter()
        """Number of pieces of work of each tenant that is present."""
        self._held: Counter[Hashable] = Counter()
        """Number of tasks of each tenant that has some."""
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Tasks that wait, by tenant; the first tenant that may begin one is next."""
        self._begun_at: dict[Hashable, float] = {}
        """Time at which each tenant that has tasks, or had some lately, began its last one."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next task that begins after a pause."""
        self._has_begun_one = False
        """True if a task that has waited begins in this round of the event loop."""

    @contextmanager
    def be_present(self, tenant: Hashable) -> Iterator[None]:
        """Note that a tenant has a piece of work, in which it begins tasks."""
        self._present[tenant] += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(self._seconds, self._leave, tenant)

    @asynccontextmanager
    async def hold(self, tenant: Hashable) -> AsyncIterator[None]:
        """Wait until a task of a tenant may begin; count it until it ends."""
        is_first = tenant not in self._waiting
        if is_first and self._may_begin(tenant) and not self._has_begun_one:
            self._note_begin(tenant)
            self._begin_next()  # others may have more tasks now
        else:
            begun = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(begun)
            self._begin_next()
            try:
                await begun
            except asyncio.CancelledError:
                if not begun.cancelled():  # it began meanwhile
                    self._end(tenant)
                raise
        try:
            yield
        finally:
            self._end(tenant)

    def _may_begin(self, tenant: Hashable) -> bool:
        others = [max(1, self._held[other]) for other in self._present if other != tenant]
        if not others or self._held[tenant] < self._multiple * min(others):
            return True
        now = asyncio.get_running_loop().time()
        return now >= self._begun_at.get(tenant, -math.inf) + _PAUSE_SECONDS

    def _note_begin(self, tenant: Hashable) -> None:
        self._held[tenant] += 1
        self._begun_at[tenant] = asyncio.get_running_loop().time()

    def _end(self, tenant: Hashable) -> None:
        _decrease(self._held, tenant)
        self._forget(tenant)
        self._begin_next()

    def _leave(self, tenant: Hashable) -> None:
        _decrease(self._present, tenant)
        self._forget(tenant)
        self._begin_next()

    def _forget(self, tenant: Hashable) -> None:
        """Forget the last task of a tenant that has none and is not present."""
        if tenant not in self._present and tenant not in self._held:
            self._begun_at.pop(tenant, None)

    def _begin_next(self) -> None:
        """Begin the next task that waits, if it may; the one after it in the next round."""
        if self._has_begun_one:
            return
        tenant = next(filter(self._may_begin, self._waiting), _NOBODY)
        if tenant is _NOBODY:
            if self._waiting and self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_PAUSE_SECONDS, self._end_pause)
            return
        tasks = self._waiting.pop(tenant)
        begun = tasks.popleft()
        if tasks:  # the others are next
            self._waiting[tenant] = tasks
        if not begun.cancelled():
            self._note_begin(tenant)
            begun.set_result(None)
        self._has_begun_one = True
        asyncio.get_running_loop().call_soon(self._begin_another)

    def _end_pause(self) -> None:
        self._timer = None
        self._begin_next()

    def _begin_another(self) -> None:
        self._has_begun_one = False
        self._begin_next()


def _decrease(counter: Counter[Hashable], tenant: Hashable) -> None:
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
