"""Requests that wait for something other than a place in a step."""

from __future__ import annotations

import math

from octavo.request import Request, RequestStatus

HELD = (
    RequestStatus.WAITING_FOR_FSM,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_WAKE_UP,
    RequestStatus.WAITING_FOR_ADAPTER,
    RequestStatus.WAITING_FOR_ADAPTER_TURN,
    RequestStatus.WAITING_FOR_ENCODER,
)
"""Statuses of held requests."""


class HeldRequests(dict[str, Request]):
    """Held requests by id: they are in no queue until `release`."""

    def add(self, request: Request, status: RequestStatus) -> None:
        """Hold a request; `status` is the reason."""
        assert status in HELD, status
        request.status = status
        self[request.request_id] = request

    def release(self, request_id: str) -> Request:
        """Remove a request from the held ones and return it."""
        request = self.pop(request_id)
        request.status = RequestStatus.WAITING
        return request

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a held request; infinite without deadlines."""
        return min((request.next_deadline for request in self.values()), default=math.inf)
