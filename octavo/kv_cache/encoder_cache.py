"""Cache of the rows that encoders compute for pictures and sounds: the plan of its contents.

The worker holds the rows (`octavo/worker/encoder_cache.py`). Requests with the same item share its
rows. Rows that no request uses any more stay until other rows need the space. GreedyDual-Size
chooses those that are given up (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997). It
weighs the work of computing an item again against its space and its age. So items of the same
encoder are given up in the order of their last use.
"""

from __future__ import annotations

import heapq

from octavo.request import Request

# Most entries of a heap that do not count, beside one for each that does.
_SPARE = 64


class EncoderCacheManager:
    """Planner of the cache's contents; vLLM has a class of this name with the same task.

    Steps execute in the order of scheduling, so rows may be given up as soon as the last step that
    reads them has been scheduled: the worker forgets them before a later step.

    Args:
        num_rows: number of rows that the cache holds.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_queries = 0
        """Number of items that steps needed."""
        self.num_hits = 0
        """Number of these that the cache had."""
        self.num_used_rows = 0
        """Number of rows that requests use."""
        self._sizes: dict[str, int] = {}
        """Number of rows of each item in the cache, by identifier."""
        self._work: dict[str, float] = {}
        """Encoder tokens for each row of these items: the work that a cached row saves."""
        self._given_up_value = 0.0
        """Largest value of an item that was given up."""
        self._num_users: dict[str, int] = {}
        """Number of users of each item that requests use."""
        self._unused: dict[str, int] = {}
        """Items that no request uses, and the number of uses that had ended when their own did."""
        self._num_ended = 0
        """Number of uses that have ended."""
        self._order: list[tuple[float, int, str]] = []
        """Heap of the values of these items, with the numbers and identifiers. A value is the work
        of the item, plus `_given_up_value` when its use ended. Entries whose number is another one
        than in `_unused` do not count."""
        self._num_unused_rows = 0
        self._held: dict[Request, dict[int, str]] = {}
        """Identifiers of the items that each request uses, by index in its `mm_features`."""
        self._freed: list[str] = []
        """Items that the worker must forget before the next step."""

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def is_held(self, request: Request, index: int) -> bool:
        """Return True if a request uses its item."""
        return index in self._held.get(request, ())

    def is_unused(self, identifier: str) -> bool:
        """Return True if the cache has an item that no request uses."""
        return identifier in self._unused

    @property
    def num_free_rows(self) -> int:
        """Number of rows that are free, or can be given up."""
        return self.num_rows - self.num_used_rows

    def acquire(self, request: Request, index: int) -> bool:
        """Let a request use an item; return True if an encoder must compute it in this step.

        Other items are given up for it. The caller has checked that there is room, and that no
        other item of this step is given up.
        """
        feature = request.mm_features[index]
        identifier, rows = feature.identifier, feature.num_rows
        self._held.setdefault(request, {})[index] = identifier
        self.num_queries += 1
        self._num_users[identifier] = self._num_users.get(identifier, 0) + 1
        if identifier in self._sizes:
            self.num_hits += 1
            if identifier in self._unused:
                del self._unused[identifier]
                self._num_unused_rows -= rows
                self.num_used_rows += rows
            return False
        self.num_used_rows += rows
        while self.num_used_rows + self._num_unused_rows > self.num_rows:
            value, number, least = heapq.heappop(self._order)
            if self._unused.get(least) == number:
                self._given_up_value = value
                self._give_up(least)
        self._sizes[identifier] = rows
        self._work[identifier] = feature.num_encoder_tokens / rows
        return True

    def release_computed(self) -> None:
        """End the use of the items whose places all scheduled steps have passed."""
        for request, items in list(self._held.items()):
            features, computed = request.mm_features, request.num_computed_tokens
            for index in [i for i in items if features[i].mm_position.end <= computed]:
                self._release(items.pop(index))
            if not items:
                del self._held[request]

    def free(self, request: Request) -> None:
        """End a request's use of all its items."""
        for identifier in self._held.pop(request, {}).values():
            self._release(identifier)

    def forget(self, request: Request) -> None:
        """Give up the items of a request that no request uses, so that they are computed again."""
        for feature in request.mm_features:
            if feature.identifier in self._unused:
                self._give_up(feature.identifier)

    def forget_all(self) -> bool:
        """Give up all items; return False, and give up none, if a request uses one."""
        if self._held:
            return False
        for identifier in list(self._unused):
            self._give_up(identifier)
        return True

    def take_freed(self) -> list[str]:
        """Return the items that the worker must forget before the step being scheduled."""
        freed, self._freed = self._freed, []
        return freed

    def check_integrity(self, running: list[Request]) -> None:
        """Check the records against the requests that may use items. O(items).

        Raises:
            AssertionError: the records are inconsistent; the message names the inconsistency.
        """
        users: dict[str, int] = {}
        for request, items in self._held.items():
            if request not in running:
                raise AssertionError(f"{request.request_id} uses rows, and does not run")
            for index, identifier in items.items():
                feature = request.mm_features[index]
                if feature.mm_position.end <= request.num_computed_tokens:
                    raise AssertionError(f"{request.request_id} keeps the rows of item {index}")
                if (feature.identifier, feature.num_rows) != (identifier, self._sizes[identifier]):
                    raise AssertionError(f"{request.request_id} uses other rows of item {index}")
                users[identifier] = users.get(identifier, 0) + 1
        if users != self._num_users or self._sizes.keys() != users.keys() | self._unused.keys():
            raise AssertionError("items of the encoder cache are lost, or have wrong users")
        used = sum(self._sizes[identifier] for identifier in users)
        unused = sum(self._sizes[identifier] for identifier in self._unused)
        if (used, unused) != (self.num_used_rows, self._num_unused_rows):
            raise AssertionError("the rows of the encoder cache are counted wrongly")
        if used + unused > self.num_rows:
            raise AssertionError(f"{used + unused} of {self.num_rows} rows are cached")

    def _release(self, identifier: str) -> None:
        self._num_users[identifier] -= 1
        if not self._num_users[identifier]:
            del self._num_users[identifier]
            self._num_ended += 1
            self._unused[identifier] = self._num_ended
            value = self._given_up_value + self._work[identifier]
            heapq.heappush(self._order, (value, self._num_ended, identifier))
            if len(self._order) > 2 * len(self._unused) + _SPARE:
                self._order = [it for it in self._order if self._unused.get(it[2]) == it[1]]
                heapq.heapify(self._order)
            self.num_used_rows -= self._sizes[identifier]
            self._num_unused_rows += self._sizes[identifier]

    def _give_up(self, identifier: str) -> None:
        del self._unused[identifier]
        del self._work[identifier]
        self._num_unused_rows -= self._sizes.pop(identifier)
        self._freed.append(identifier)
