"""Interface of the observers of an engine core, and the listener that writes debug logs."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence

from octavo.kv_cache.given_up import GivenUp
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerOutput
from octavo.request import Request

logger = logging.getLogger(__name__)


class WaitReason(enum.Enum):
    """Reason why the first waiting request does not start; the value is a text for users."""

    SEAT = "max_num_seqs requests run"
    BUDGET = "the step has no tokens left for it"
    BLOCKS = "there are not enough free KV blocks"
    LEADER = "this step computes the end of the prompt that it shares"
    REMOTE_KVS = "a KV connector loads its KV blocks"
    ENCODER = "the step computes, or has in memory, as many pictures or sounds as it can"
    IN_FLIGHT = "it was preempted, and steps in flight still sample its tokens"


class StepListener:
    """Base class of the observers of an engine core.

    Core and scheduler call these methods while they work, so each must be quick. All run on the
    engine's thread, except `on_computed`. Steps are numbered from 1.
    """

    def on_add(self, request: EngineCoreRequest) -> None:
        """React to a new request."""

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """React to requests that are aborted; some may be unknown."""

    def on_begin(self, step: int) -> None:
        """React to the begin of a step's scheduling."""

    def on_wait(self, request: Request, reason: WaitReason) -> None:
        """React to the first waiting request that cannot start; later requests also wait."""

    def on_blocks_missing(self, held: Callable[[], Mapping[str, int]]) -> None:
        """React to a wait for KV blocks, after `on_wait`.

        Args:
            held: returns the number of blocks of each request.
        """

    def on_preempt(self, request: Request, by: Request | None) -> None:
        """React to a preemption in favour of `by`; None: the request's step failed."""

    def on_hold(self, request: Request) -> None:
        """React to a request that waits outside of the queue; its status is the reason."""

    def on_ready(self, request: Request) -> None:
        """React to a held request that joins the queue."""

    def on_given_up(self, request: Request, given_up: GivenUp) -> None:
        """React to a request that starts with a shorter prefix since the cache gave up a part."""

    def on_schedule(self, step: int, work: SchedulerOutput) -> None:
        """React to a scheduled step, just before the executor receives it."""

    def on_computed(self, step: int) -> None:
        """React to the end of a step's computation; runs on the thread that computes."""

    def on_result(self, step: int, waited: float, failed: bool, sample_seconds: float) -> None:
        """React to a step's result or failure, possibly before `on_computed`.

        Args:
            step: number of the step.
            waited: seconds for which the engine waited for it.
            failed: True if the step failed, or is computed again.
            sample_seconds: see `ModelRunnerOutput`; 0 if the step failed.
        """

    def on_outputs(self, outputs: EngineCoreOutputs, is_idle: bool) -> None:
        """React to the outputs of `EngineCore.step`; `is_idle`: the core has no more work."""

    def on_reset(self) -> None:
        """React to a reset of the prefix cache."""

    def close(self) -> None:
        """Release the listener's resources. A second call is harmless."""


class LogListener(StepListener):
    """Listener that logs preemptions, and one line for each reason why a request waits."""

    def __init__(self) -> None:
        self._last: tuple[str, WaitReason] | None = None

    @staticmethod
    def is_enabled() -> bool:
        """Return True if debug lines of this module are logged."""
        return logger.isEnabledFor(logging.DEBUG)

    def on_wait(self, request: Request, reason: WaitReason) -> None:
        """Log the reason unless the last line states it."""
        if self._last != (request.request_id, reason):
            self._last = request.request_id, reason
            logger.debug("request %s waits: %s", request.request_id, reason.value)

    def on_preempt(self, request: Request, by: Request | None) -> None:
        """Log the preemption."""
        cause = "a step failed" if by is None else f"request {by.request_id} needs its blocks"
        logger.debug("request %s is preempted: %s", request.request_id, cause)
