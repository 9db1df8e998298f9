"""The waiting requests, in the order in which they will be served."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from octavo.request import QueueKey, Request

Policy = Literal["fcfs", "priority"]


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
        self._num_calls += request.turn == 0
        priority = request.priority if self._policy == "priority" else 0
        return (priority, self._num_calls + request.turn, self._num_requests)


class RequestQueue:
    """A heap of requests by `queue_key`, the same for every policy.

    A preempted request keeps its key, so pushing it puts it back before all that came after it.
    `push` and `pop` are O(log n); `remove` is O(1): the heap's entry is skipped once it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[QueueKey] = []
        self._requests: dict[QueueKey, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.queue_key) is request

    def __iter__(self) -> Iterator[Request]:
        """The requests in order of service. O(n log n)."""
        return iter([self._requests[key] for key in sorted(self._requests)])

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        assert request.queue_key not in self._requests, f"{request.request_id} is queued twice"
        self._requests[request.queue_key] = request
        heapq.heappush(self._heap, request.queue_key)

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
        del self._requests[request.queue_key]
        if len(self._heap) > 2 * len(self._requests) + 64:  # mostly removed entries
            self._heap = sorted(self._requests)
