"""The deadlines of requests, checked before each step."""

from __future__ import annotations

import math
from collections.abc import Collection

from octavo.request import Request


class Deadlines:
    """The time before which no request expires, so that most steps need no search."""

    def __init__(self) -> None:
        self.next = math.inf

    def add(self, request: Request) -> None:
        """Respect the deadlines of a new request."""
        self.next = min(self.next, request.next_deadline)

    def find_expired(self, requests: Collection[Request], now: float) -> list[Request]:
        """Return the requests that are past a deadline, and set `next` by the others."""
        expired = [request for request in requests if request.next_deadline <= now]
        self.next = min(
            (r.next_deadline for r in requests if r.next_deadline > now), default=math.inf
        )
        return expired


def describe_expiry(request: Request, now: float) -> tuple[str, str]:
    """Return the message and the error class for a request that is past a deadline."""
    if request.options.deadline is None or request.options.deadline > now:
        return "The first token did not arrive in time.", "FirstTokenError"
    message = f"The deadline passed after {request.num_output_tokens} output tokens."
    return message, "DeadlineError"
