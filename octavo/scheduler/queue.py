"""The waiting requests, in the order in which they will be served.

Priority comes first. Within it tenants share the tokens (`fairness.py`); of one tenant whoever has
a deadline goes before the others, see `TenantQueue`, and these go in the order of `Arrivals`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from octavo.request import QueueKey, Request
from octavo.scheduler.fairness import Tenant, TenantCounters

Policy = Literal["fcfs", "priority"]

# Requests with deadlines that are started in a row while one without waits.
_IN_A_ROW = 3


class Arrivals:
    """Gives each request that comes its place in the order of service.

    A call may bring many requests: a list of prompts, n answers to each. Served as they come, they
    would hold up everybody who comes later. So a call is counted once, and its requests take turns
    with those of later calls: request i of call c stands where call c + i does. Nobody waits for
    ever, since whoever comes later has a later place.

    Args:
        policy: "fcfs" looks at the arrival only, "priority" first at the priority.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._num_requests = 0
        self._num_calls = 0

    def next_key(self, request: Request) -> QueueKey:
        """The key of the request that comes next; the smallest key is served first."""
        self._num_requests += 1
        self._num_calls += request.options.turn == 0
        priority = request.options.priority if self._policy == "priority" else 0
        return (priority, self._num_calls + request.options.turn, self._num_requests)


def _by_arrival(request: Request) -> QueueKey:
    return request.queue_key


def _by_deadline(request: Request) -> tuple[float, ...]:
    priority, *arrival = request.queue_key
    return (priority, request.options.due, *arrival)


class RequestQueue:
    """A heap of requests, by `queue_key` if nothing else is said.

    A preempted request keeps its key, so pushing it puts it back before all that came after it.
    `push` and `pop` are O(log n); `remove` is O(1): the heap's entry is skipped once it surfaces.

    Args:
        key: the smallest one is served first; no two requests have the same, nor does it change.
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
        """The requests in order of service. O(n log n)."""
        return iter([self._requests[key] for key in sorted(self._requests)])

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        key = self._key(request)
        assert key not in self._requests, f"{request.request_id} is queued twice"
        self._requests[key] = request
        heapq.heappush(self._heap, key)

    def peek(self) -> Request:
        """The request to be served next; there must be one."""
        while self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]]

    def pop(self) -> Request:
        """Takes the request to be served next."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        del self._requests[self._key(request)]
        if len(self._heap) > 2 * len(self._requests) + 64:  # mostly removed entries
            self._heap = sorted(self._requests)


class TenantQueue:
    """The waiting requests of one tenant.

    Within a priority those with a deadline go first, the earliest one before the others. After
    three of them in a row one without is started, so that these get a quarter of the starts at
    least, in their own order; and one with a deadline waits no longer than that. So still nobody
    waits for ever.
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
        """The requests, those with deadlines first. O(n log n)."""
        yield from self._timed
        yield from self._others

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        self._queue_of(request).push(request)

    def peek(self) -> Request:
        """The request to be served next; there must be one."""
        if not self._timed or not self._others:
            return (self._timed or self._others).peek()
        timed, other = self._timed.peek(), self._others.peek()
        if timed.queue_key[0] != other.queue_key[0]:
            return min(timed, other, key=_by_arrival)
        return timed if self._in_a_row < _IN_A_ROW else other

    def start(self, request: Request) -> None:
        """Takes out a request that is started."""
        self.remove(request)
        passes = self._others and self._queue_of(request) is self._timed
        self._in_a_row = self._in_a_row + 1 if passes else 0

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        self._queue_of(request).remove(request)

    def _queue_of(self, request: Request) -> RequestQueue:
        return self._others if request.options.due == math.inf else self._timed


class WaitingQueue:
    """The waiting requests of all tenants.

    Within a priority the tenant that was served least is next. Who is next costs O(tenants that
    wait).

    Args:
        tenants: knows who was served how much.
    """

    def __init__(self, tenants: TenantCounters) -> None:
        self._tenants = tenants
        self._queues: dict[Tenant, TenantQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)  # it is asked several times a step

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.options.share)
        return queue is not None and request in queue

    def __iter__(self) -> Iterator[Request]:
        """The requests, tenant by tenant. O(n log n)."""
        for queue in list(self._queues.values()):
            yield from queue

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        self._queues.setdefault(request.options.share, TenantQueue()).push(request)

    def peek(self) -> Request:
        """The request to be served next; there must be one."""
        return min([queue.peek() for queue in self._queues.values()], key=self.rank)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Whose turn it is among tenants' first requests: the smallest one's."""
        priority, *arrival = request.queue_key
        return (priority, *self._tenants.rank(request.options.share), *arrival)

    def start(self, request: Request) -> None:
        """Takes out a request that is started."""
        self._queues[request.options.share].start(request)
        self._drop_empty(request.options.share)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        self._queues[request.options.share].remove(request)
        self._drop_empty(request.options.share)

    def _drop_empty(self, tenant: Tenant) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
