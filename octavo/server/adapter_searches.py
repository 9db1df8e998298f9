"""Searches for adapters that requests name and the server does not know yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from octavo.errors import QueueFullError
from octavo.frontend.request_memory import leaves_room
from octavo.lora_request import MAX_ADAPTER_NAME
from octavo.server.errors import UnavailableError, show

T = TypeVar("T")

_MOST_SEARCHES = 64
"""Most names that are searched for at the same time."""
_SEARCH_SECONDS = 60.0
"""Most seconds of a search, in which the adapter may be downloaded."""


class AdapterSearches(Generic[T]):
    """Searches that run. All requests that name an adapter wait for the same search.

    Args:
        search: finds an adapter by its name; returns None if no adapter has it.
    """

    def __init__(self, search: Callable[[str], Awaitable[T | None]]) -> None:
        self._search = search
        self._running: dict[str, asyncio.Task[T | None]] = {}
        """Searches by name."""
        self._begun: Counter[str | None] = Counter()
        """Numbers of the running searches, by the tenant whose request began them."""

    async def find(self, name: str, tenant: str | None) -> T | None:
        """Find an adapter; return None if no adapter has this name.

        The search continues for other requests if this one gives up.

        Args:
            name: the name.
            tenant: tenant of the request; each of several leaves searches to the others.

        Raises:
            QueueFullError: too many names are searched for.
            UnavailableError: the search takes too long, or a resolver ended it.
            RequestError: the error of the search.
        """
        if not (0 < len(name) <= MAX_ADAPTER_NAME and name.isprintable()):
            return None
        task = self._running.get(name)
        if task is None:
            task = self._begin(name, tenant)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by a resolver, not by this request
                raise UnavailableError(f"The search for the adapter {show(name)} ended.") from None
            raise

    def _begin(self, name: str, tenant: str | None) -> asyncio.Task[T | None]:
        held, free = self._begun[tenant], _MOST_SEARCHES - len(self._running)
        if free < 1:
            raise QueueFullError(
                f"The server already looks for {_MOST_SEARCHES} adapters; try again later.", 1
            )
        if tenant is not None and not leaves_room(held, 1, free):
            raise QueueFullError(
                f"The server already looks for {held} adapters for this API key, and others need "
                "room; try again later.",
                1,
            )
        task = asyncio.create_task(self._limited(name))
        self._running[name] = task
        self._begun[tenant] += 1
        task.add_done_callback(partial(self._end, name, tenant))
        return task

    async def _limited(self, name: str) -> T | None:
        try:
            async with asyncio.timeout(_SEARCH_SECONDS):
                return await self._search(name)
        except TimeoutError:
            raise UnavailableError(
                f"The adapter {show(name)} was not found within {_SEARCH_SECONDS:.0f} s; try again "
                "later."
            ) from None

    def _end(self, name: str, tenant: str | None, task: asyncio.Task[T | None]) -> None:
        del self._running[name]
        self._begun[tenant] -= 1
        if not self._begun[tenant]:
            del self._begun[tenant]
        if not task.cancelled():
            task.exception()  # all requests may have given up
