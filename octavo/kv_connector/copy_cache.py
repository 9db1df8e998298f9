"""Slots for copies of blocks, and the policies that evict one for another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

Key: TypeAlias = tuple[int, bytes]
"""A KV-cache group and a block's hash; or a piece of a state, numbered after the groups."""


class CopyCache(ABC):
    """Slots, each for the copy of a block.

    A pinned copy is not evicted: it is being written or read.

    Args:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Key, int] = {}
        self._pins: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def pinned(self, key: Key) -> bool:
        """Return True if a copy is pinned."""
        return key in self._pins

    def slot(self, key: Key) -> int:
        """Return the slot of a copy."""
        return self._slots[key]

    def insert(self, key: Key, *, pin: bool = False) -> int | None:
        """Return a slot for a new copy; None: all are pinned."""
        assert key not in self._slots
        if not self._free and not self._evict(key):
            return None
        slot = self._slots[key] = self._free.pop()
        self._note_insert(key)
        if pin:
            self.pin(key)
        return slot

    def restore(self, key: Key, slot: int) -> None:
        """Add the copy that a slot had in an earlier run."""
        self._free.remove(slot)
        self._slots[key] = slot
        self._note_insert(key)

    def touch(self, key: Key) -> None:
        """Note that a copy was requested."""
        self._note_hit(key)

    def pin(self, key: Key) -> None:
        """Keep a copy until each `pin` has been undone by an `unpin`."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Undo a `pin`."""
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def remove(self, key: Key) -> None:
        """Remove a copy that is not pinned."""
        assert key not in self._pins
        self._free.append(self._slots.pop(key))
        self._note_removed(key)

    def clear(self) -> None:
        """Remove all copies that are not pinned."""
        for key in [key for key in self._slots if key not in self._pins]:
            self.remove(key)

    def _evict(self, new: Key) -> bool:
        """Evict a copy; return False if all are pinned."""
        key = self._choose(new)
        if key is None:
            return False
        self._free.append(self._slots.pop(key))
        self._note_evicted(key)
        return True

    def _oldest(self, order: OrderedDict[Key, None]) -> Key | None:
        """Return the first copy that is not pinned."""
        return next((key for key in order if key not in self._pins), None)

    @abstractmethod
    def _choose(self, new: Key) -> Key | None:
        """Return the copy to evict for a new one; None: all are pinned."""

    @abstractmethod
    def _note_insert(self, key: Key) -> None: ...

    @abstractmethod
    def _note_hit(self, key: Key) -> None: ...

    @abstractmethod
    def _note_removed(self, key: Key) -> None: ...

    @abstractmethod
    def _note_evicted(self, key: Key) -> None: ...


class LRUCopyCache(CopyCache):
    """Eviction of the least recently used copy."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order)

    def _choose(self, new: Key) -> Key | None:
        return self._oldest(self._order)

    def _note_insert(self, key: Key) -> None:
        self._order[key] = None

    def _note_hit(self, key: Key) -> None:
        self._order.move_to_end(key)

    def _note_removed(self, key: Key) -> None:
        del self._order[key]

    _note_evicted = _note_removed


class ARCCopyCache(CopyCache):
    """Adaptive replacement: copies that were requested again stay longer than new ones.

    Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003, figure 4. The
    share of each of the two kinds adapts to the requests for evicted copies.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1
        self._again: OrderedDict[Key, None] = OrderedDict()  # T2
        self._gone_once: OrderedDict[Key, None] = OrderedDict()  # B1
        self._gone_again: OrderedDict[Key, None] = OrderedDict()  # B2
        self._target = 0.0  # p: room for T1

    def _choose(self, new: Key) -> Key | None:
        if new in self._gone_once:
            more = max(1.0, len(self._gone_again) / len(self._gone_once))
            self._target = min(float(self.num_slots), self._target + more)
        elif new in self._gone_again:
            less = max(1.0, len(self._gone_once) / len(self._gone_again))
            self._target = max(0.0, self._target - less)
        over = len(self._once) - self._target
        first, second = self._once, self._again
        if not (over > 0 or (over == 0 and new in self._gone_again)):
            first, second = second, first
        found = self._oldest(first)
        return self._oldest(second) if found is None else found

    def _note_insert(self, key: Key) -> None:
        known = [gone for gone in (self._gone_once, self._gone_again) if key in gone]
        for gone in known:
            del gone[key]
        (self._again if known else self._once)[key] = None

    def _note_hit(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def _note_removed(self, key: Key) -> None:
        (self._once if key in self._once else self._again).pop(key)

    def _note_evicted(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._gone_once[key] = None
        else:
            del self._again[key]
            self._gone_again[key] = None
        while len(self._once) + len(self._gone_once) > self.num_slots and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_once) + len(self._gone_again) > self.num_slots and self._gone_again:
            self._gone_again.popitem(last=False)


EVICTION_POLICIES: dict[str, type[CopyCache]] = {"lru": LRUCopyCache, "arc": ARCCopyCache}
"""Policies by the value of `eviction_policy`."""
