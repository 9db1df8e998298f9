"""The waiting requests, in the order in which they will be served."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from octavo.request import QueueKey, Request

Policy = Literal["fcfs", "priority"]


def make_queue_key(policy: Policy, request: Request, arrival_number: int) -> QueueKey:
    """A request's place in the order of service; the smallest key is served first.

    Args:
        policy: "fcfs" looks at the arrival only, "priority" first at the priority.
        request: the request.
        arrival_number: which request it is since the start; decides ties.
    """
    priority = request.priority if policy == "priority" else 0
    return (priority, request.arrival_time, arrival_number)


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
