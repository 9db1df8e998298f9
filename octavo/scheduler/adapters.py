"""Adapters of requests: which are in the workers' memory, and whose turn it is.

A request whose adapter is not in memory waits until it has been read into a slot. The adapter of an
unfinished request never leaves its slot. Among the others the least recently used one makes place.
At most `max_loras` different adapters run at the same time.

No request waits forever. While an adapter waits for a slot, or for its turn, at most `MOST_PASSES`
requests join each adapter that has what it waits for; later ones wait behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.request import Request

MOST_PASSES = 64
"""Most requests that join an adapter while another one waits."""


@dataclass(slots=True, eq=False)
class _Place:
    """Slot that an adapter has."""

    slot: int
    adapter: AdapterRef
    users: dict[str, None] = field(default_factory=dict)
    """Ids of the unfinished requests that use it, in order of arrival."""
    is_loaded: bool = False
    """True once all workers have read it."""
    num_passes: int = 0
    """Number of requests that have joined it since another adapter waits."""


def key_of(request: Request) -> str | None:
    """Return the key of a request's adapter; None: it has no adapter."""
    adapter = request.options.adapter
    return None if adapter is None else adapter.key


class AdapterSlots:
    """Slots of the workers' memory for adapters, by their content.

    Args:
        num_slots: number of adapters that the memory has room for.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._places: dict[str, _Place] = {}
        """Places by content hash, the least recently used one first."""
        self._waiting: dict[str, dict[str, AdapterRef]] = {}
        """Requests, by id, that wait for a slot, by content hash, in order of arrival."""
        self._changes: list[AdapterChange] = []

    @property
    def has_changes(self) -> bool:
        """True if `take_changes` returns any."""
        return bool(self._changes)

    @property
    def in_memory(self) -> list[AdapterRef]:
        """Loaded adapters, the least recently used one first."""
        return [place.adapter for place in self._places.values() if place.is_loaded]

    @property
    def num_loading(self) -> int:
        """Number of adapters that workers read."""
        return sum(not place.is_loaded for place in self._places.values())

    def take_changes(self) -> list[AdapterChange]:
        """Return the changes for the workers since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def add(self, request: Request) -> None:
        """Note a new request; `is_ready` tells when its adapter is in memory."""
        adapter, key = request.options.adapter, key_of(request)
        if adapter is None or key is None:
            return
        place = self._places.get(key)
        joins = place is not None and key not in self._waiting
        if place is not None and joins and self._waiting:
            place.num_passes += 1
            joins = place.num_passes <= MOST_PASSES
        if place is not None and joins:
            self._join(place, {request.request_id: adapter})
        else:
            self._waiting.setdefault(key, {})[request.request_id] = adapter
            self._fill()

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        key = key_of(request)
        if key is None:
            return
        if (waiting := self._waiting.get(key)) is not None:
            waiting.pop(request.request_id, None)
            if not waiting:
                del self._waiting[key]
        if (place := self._places.get(key)) is not None:
            place.users.pop(request.request_id, None)
        self._fill()

    def is_ready(self, request: Request) -> bool:
        """Return True if a request has no adapter, or holds its adapter in memory."""
        key = key_of(request)
        place = None if key is None else self._places.get(key)
        if place is None:
            return key is None
        return place.is_loaded and request.request_id in place.users

    def slot_of(self, request: Request) -> int:
        """Return the slot of a ready request's adapter; -1: it has none."""
        key = key_of(request)
        return -1 if key is None else self._places[key].slot

    def finish(self, loaded: AdapterLoaded) -> list[str]:
        """Note that all workers have read an adapter, or that one could not.

        Returns:
            Ids of the requests that waited for it, in order of arrival; after an error they have no
            place, and the caller ends them.
        """
        (place,) = (place for place in self._places.values() if place.slot == loaded.slot)
        users = list(place.users)
        if loaded.error is None:
            place.is_loaded = True
        else:
            self._vacate(place)
        self._fill()
        return users

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Check that slots and records are consistent with the unfinished requests.

        Raises:
            AssertionError: they are not; the message names the error.
        """
        held = [i for place in self._places.values() for i in place.users]
        held += [i for waiting in self._waiting.values() for i in waiting]
        if sorted(held) != sorted(r.request_id for r in requests if key_of(r) is not None):
            raise AssertionError("a request with an adapter is lost, or in two places")
        if self._waiting and (self._free or self._idle() is not None):
            raise AssertionError("an adapter waits although there is a slot for it")

    def _join(self, place: _Place, requests: Iterable[str]) -> None:
        """Let requests use a place, which is the most recently used one now."""
        place.users.update(dict.fromkeys(requests))
        key = place.adapter.key
        self._places[key] = self._places.pop(key)

    def _fill(self) -> None:
        """Give slots to the adapters that wait, in order of arrival."""
        while self._waiting:
            key = next(iter(self._waiting))
            place = self._places.get(key)
            if place is None:
                if not self._free and (idle := self._idle()) is not None:
                    self._vacate(idle)
                if not self._free:
                    return
                adapter = next(iter(self._waiting[key].values()))
                place = self._places[key] = _Place(self._free.pop(), adapter)
                self._changes.append(AdapterChange(place.slot, adapter))
            place.num_passes = 0
            self._join(place, self._waiting.pop(key))
        for place in self._places.values():
            place.num_passes = 0

    def _idle(self) -> _Place | None:
        """Return the least recently used place without users; None: all places have users."""
        idle = (p for p in self._places.values() if p.is_loaded and not p.users)
        return next(idle, None)

    def _vacate(self, place: _Place) -> None:
        del self._places[place.adapter.key]
        self._free.append(place.slot)
        self._changes.append(AdapterChange(place.slot, None))


class AdapterTurns:
    """Turns of adapters: at most `max_loras` different ones among the running requests."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self.blocked: set[str] = set()
        """Ids of the requests that wait for their turn."""
        self._num_passes = 0
        """Number of requests that started with a running adapter since another one waits."""

    def may_start(self, request: Request, running: Iterable[Request]) -> bool:
        """Return True if a request's adapter may run now; else the request is blocked."""
        key = key_of(request)
        if key is None:
            return True
        live = _adapters(running)
        if key in live:
            may_start = not self.blocked or self._num_passes < MOST_PASSES
        else:
            may_start = len(live) < self._max_loras
        if not may_start:
            self.blocked.add(request.request_id)
        return may_start

    def note_start(self, request: Request) -> None:
        """Note that a request starts."""
        self._num_passes += bool(self.blocked) and key_of(request) is not None

    def release(self, running: Iterable[Request]) -> set[str]:
        """Return the blocked requests if another adapter may run now; they are tried again."""
        if not self.blocked or len(_adapters(running)) >= self._max_loras:
            return set()
        released, self.blocked, self._num_passes = self.blocked, set(), 0
        return released


def _adapters(running: Iterable[Request]) -> set[str]:
    return {key for request in running if (key := key_of(request)) is not None}
