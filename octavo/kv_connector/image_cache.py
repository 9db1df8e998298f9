"""Which blocks are kept in a number of places, and which one has to go for another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

Key: TypeAlias = tuple[int, bytes]
"""A KV-cache group and a block's hash."""


class ImageCache(ABC):
    """Places, each for the image of a block, and what is in them.

    A pinned one stays: something is being copied there, or from there.

    Args:
        num_slots: places.
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
        """Whether an image has to stay for now."""
        return key in self._pins

    def slot(self, key: Key) -> int:
        """Where an image is."""
        return self._slots[key]

    def insert(self, key: Key, *, pin: bool = False) -> int | None:
        """Finds a place for an image that is not here; None: all are pinned."""
        assert key not in self._slots
        if not self._free and not self._evict(key):
            return None
        slot = self._slots[key] = self._free.pop()
        self._note_insert(key)
        if pin:
            self.pin(key)
        return slot

    def restore(self, key: Key, slot: int) -> None:
        """Takes in what was in a place before."""
        self._free.remove(slot)
        self._slots[key] = slot
        self._note_insert(key)

    def touch(self, key: Key) -> None:
        """An image was asked for."""
        self._note_hit(key)

    def pin(self, key: Key) -> None:
        """Has it stay until `unpin` was called as often."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Ends what `pin` began."""
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def remove(self, key: Key) -> None:
        """Forgets an image; it is not pinned."""
        assert key not in self._pins
        self._free.append(self._slots.pop(key))
        self._note_removed(key)

    def clear(self) -> None:
        """Forgets all that is not pinned."""
        for key in [key for key in self._slots if key not in self._pins]:
            self.remove(key)

    def _evict(self, new: Key) -> bool:
        """Makes room for one; False: all are pinned."""
        key = self._choose(new)
        if key is None:
            return False
        self._free.append(self._slots.pop(key))
        self._note_evicted(key)
        return True

    def _oldest(self, order: OrderedDict[Key, None]) -> Key | None:
        """The first one that is not pinned."""
        return next((key for key in order if key not in self._pins), None)

    @abstractmethod
    def _choose(self, new: Key) -> Key | None:
        """Who has to go for another one."""

    @abstractmethod
    def _note_insert(self, key: Key) -> None: ...

    @abstractmethod
    def _note_hit(self, key: Key) -> None: ...

    @abstractmethod
    def _note_removed(self, key: Key) -> None: ...

    @abstractmethod
    def _note_evicted(self, key: Key) -> None: ...


class LRUImageCache(ImageCache):
    """What was not asked for longest goes first."""

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


class ARCImageCache(ImageCache):
    """What was asked for again stays longer than what was only put here.

    Adaptive replacement (Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache,
    FAST 2003, figure 4): how much room each of the two gets follows from which of those that went
    is asked for.
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


EVICTION_POLICIES: dict[str, type[ImageCache]] = {"lru": LRUImageCache, "arc": ARCImageCache}
"""By the names of `eviction_policy`."""
