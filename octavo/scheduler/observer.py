"""Why the scheduler did what it did, for whoever wants to know."""

from __future__ import annotations

import enum
import logging
from typing import Protocol

from octavo.request import Request

logger = logging.getLogger(__name__)


class WaitReason(enum.Enum):
    """Why the first of the waiting requests was not started; the value is for people."""

    SEAT = "max_num_seqs requests run"
    BUDGET = "the step has no tokens left for it"
    BLOCKS = "there are not enough free KV blocks"
    LEADER = "this step computes the end of the prompt that it shares"
    REMOTE_KVS = "a KV connector loads what it has of it"
    IN_FLIGHT = "it was preempted, and steps in flight sample for it"


class SchedulerObserver(Protocol):
    """Is told by the scheduler, while it schedules; must be quick."""

    def on_wait(self, request: Request, reason: WaitReason) -> None:
        """The first of the waiting requests goes on waiting, and those behind it."""
        ...

    def on_preempt(self, request: Request, by: Request | None) -> None:
        """A running request gave up its place: for `by`; None: its step failed."""
        ...


class LogObserver:
    """Writes debug lines; while a request waits for the same reason, one."""

    def __init__(self) -> None:
        self._last: tuple[str, WaitReason] | None = None

    def on_wait(self, request: Request, reason: WaitReason) -> None:
        """See `SchedulerObserver`."""
        if self._last != (request.request_id, reason):
            self._last = request.request_id, reason
            logger.debug("request %s waits: %s", request.request_id, reason.value)

    def on_preempt(self, request: Request, by: Request | None) -> None:
        """See `SchedulerObserver`."""
        cause = "a step failed" if by is None else f"request {by.request_id} needs its blocks"
        logger.debug("request %s is preempted: %s", request.request_id, cause)
