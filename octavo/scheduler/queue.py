"""Queues of waiting requests, in the order of service.

Priority is the first criterion. Within a priority, tenants share the tokens (`fairness.py`). Within
a tenant, requests with deadlines are first, see `TenantQueue`; the others have the order of
`Arrivals`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from octavo.request import QueueKey, Request
from octavo.scheduler.fairness import Tenant, TenantCounters

Policy = Literal["fcfs", "priority"]

BACKGROUND = 2**31
"""Priority of requests in the background, worse than that of any other request."""

# Requests with deadlines that are started in a row while one without a deadline waits.
_IN_A_ROW = 3


class Arrivals:
    """Source of the keys that order requests by arrival.

    A call may contain many requests: a list of prompts with n answers each. In plain order of
    arrival they would delay all later calls. So request i of call c has the same rank as call
    c + i, and the requests of several calls alternate. No request waits forever, since later calls
    have higher ranks.

    Args:
        policy: "fcfs" orders by arrival, "priority" first by priority.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._num_requests = 0
        self._num_calls = 0

    def next_key(self, request: Request) -> QueueKey:
        """Return the key of a new request; the scheduler serves the smallest key first."""
        self._num_requests += 1
        self._num_calls += request.options.turn == 0
        priority = request.options.priority if self._policy == "priority" else 0
        if request.options.background:
            priority = BACKGROUND
        return (priority, self._num_calls + request.options.turn, self._num_requests)


def _by_arrival(request: Request) -> QueueKey:
    return request.queue_key


def _by_deadline(request: Request) -> tuple[float, ...]:
    priority, *arrival = request.queue_key
    return (priority, request.options.due, *arrival)


class RequestQueue:
    """A heap of requests, by default ordered by `queue_key`.

    A preempted request keeps its key, so that `push` puts it before all later requests. `push` and
    `pop` are O(log n). `remove` is O(1): `peek` skips the heap's entry later.

    Args:
        key: returns the unique and constant key of a request; the smallest is served first.
    """

    def __init__(self, key: Callable[[Request], tuple[Any, ...]] = _by_arrival) -> None:
        self._key = key
        self._heap: list[tuple[Any, ...]] = []
        self._requests: dict[tuple[Any, ...], Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(self._key(request)) is request

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in order of service. O(n log n)."""
        return iter([self._requests[key] for key in sorted(self._requests)])

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        key = self._key(request)
        assert key not in self._requests, f"{request.request_id} is queued twice"
        self._requests[key] = request
        heapq.heappush(self._heap, key)

    def peek(self) -> Request:
        """Return the request to be served next; the queue must not be empty."""
        while self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]]

    def pop(self) -> Request:
        """Remove and return the request to be served next."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request at any place."""
        del self._requests[self._key(request)]
        if len(self._heap) > 2 * len(self._requests) + 64:  # mostly removed entries
            self._heap = sorted(self._requests)


class TenantQueue:
    """The waiting requests of one tenant.

    Within a priority, requests with deadlines are first, in the order of their deadlines. After
    three of them in a row, the scheduler starts a request without a deadline, if one waits. Those
    get at least a quarter of the starts, in order of arrival, so no request waits forever.
    """

    def __init__(self) -> None:
        self._timed = RequestQueue(_by_deadline)
        self._others = RequestQueue()
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._timed) + len(self._others)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue_of(request)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, those with deadlines first. O(n log n)."""
        yield from self._timed
        yield from self._others

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        self._queue_of(request).push(request)

    def peek(self) -> Request:
        """Return the request to be served next; the queue must not be empty."""
        if not self._timed or not self._others:
            return (self._timed or self._others).peek()
        timed, other = self._timed.peek(), self._others.peek()
        if timed.queue_key[0] != other.queue_key[0]:
            return min(timed, other, key=_by_arrival)
        return timed if self._in_a_row < _IN_A_ROW else other

    def start(self, request: Request) -> None:
        """Remove a request because it is started."""
        self.remove(request)
        passes = self._others and self._queue_of(request) is self._timed
        self._in_a_row = self._in_a_row + 1 if passes else 0

    def remove(self, request: Request) -> None:
        """Remove a request at any place."""
        self._queue_of(request).remove(request)

    def _queue_of(self, request: Request) -> RequestQueue:
        return self._others if request.options.due == math.inf else self._timed


class WaitingQueue:
    """The waiting requests of all tenants.

    Within a priority, the least served tenant is next. `peek` is O(waiting tenants).

    Args:
        tenants: counters of the tokens of each tenant.
    """

    def __init__(self, tenants: TenantCounters) -> None:
        self._tenants = tenants
        self._queues: dict[Tenant, TenantQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)  # cheap: the scheduler calls it several times a step

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.options.share)
        return queue is not None and request in queue

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, tenant by tenant. O(n log n)."""
        for queue in list(self._queues.values()):
            yield from queue

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        self._queues.setdefault(request.options.share, TenantQueue()).push(request)

    def peek(self) -> Request:
        """Return the request to be served next; the queue must not be empty."""
        return min([queue.peek() for queue in self._queues.values()], key=self.rank)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Return the sort key among tenants' first requests; the smallest is served next."""
        priority, *arrival = request.queue_key
        return (priority, *self._tenants.rank(request.options.share), *arrival)

    def start(self, request: Request) -> None:
        """Remove a request because it is started."""
        self._queues[request.options.share].start(request)
        self._drop_empty(request.options.share)

    def remove(self, request: Request) -> None:
        """Remove a request at any place."""
        self._queues[request.options.share].remove(request)
        self._drop_empty(request.options.share)

    def _drop_empty(self, tenant: Tenant) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
