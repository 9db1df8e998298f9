"""Records of an engine's steps, which the engine core sends to the front end.

`explain` and the engine view are made from them. Times are seconds of `octavo.system.clock`.
"""

from __future__ import annotations

import msgspec


class StepPart(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Part of one request in a step."""

    request_id: str
    """Id in the core: each of n answers has a separate one."""
    num_tokens: int
    """Number of computed tokens, drafts included."""
    num_drafts: int = 0
    num_known_tokens: int | None = None
    """In the first step after an arrival or a preemption: tokens that were found in the cache."""
    num_prompt_tokens: int = 0
    """With `num_known_tokens` only: tokens to compute or to find before the next new token."""


class StepWait(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The first request that waited when a step was scheduled; later ones waited behind it."""

    request_id: str
    reason: str
    """Name of a `WaitReason`."""
    holders: list[tuple[str, int]] = []
    """With BLOCKS, a few times a second: the requests with the most KV blocks, and how many."""


class StepPreemption(msgspec.Struct, array_like=True, frozen=True):
    """Request that lost its blocks when a step was scheduled."""

    request_id: str
    by: str | None
    """Request that needed the blocks; None: a step of the request failed."""


class StepEvent(msgspec.Struct, array_like=True, frozen=True):
    """Event of a request outside of steps, reported with the next step."""

    request_id: str
    """Id in the core; with ADDED that of all n answers."""
    time: float
    kind: str
    """ADDED: the engine received it; the name of a `RequestStatus`: it is held for that reason;
    READY: it is no longer held; GIVEN_UP: see `by`."""
    by: str | None = None
    """With GIVEN_UP: the request starts with fewer cached tokens, because at `time` the cache used
    the next block for the request `by`."""


class StepRecord(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Step that has ended.

    The engine computes one step after the other. It schedules a step while earlier steps are
    computed, so `scheduled` may be long before `begun`.
    """

    number: int
    """Number of the step, from 1 for each engine process; 0: no step, only events."""
    schedule_begun: float
    scheduled: float
    begun: float
    """Begin of the computation: the step was scheduled, and the one before it had been computed."""
    computed: float
    """End of the computation, sampling included."""
    processed: float
    """Time at which the engine had processed the result."""
    parts: list[StepPart]
    wait: StepWait | None = None
    preemptions: list[StepPreemption] = []
    failed: bool = False
    """True if the step failed, or is computed again."""
    sample_seconds: float = 0.0
    """Part of the computation after the forward pass; see `ModelRunnerOutput`."""
    events: list[StepEvent] = []
    """Events since the last report, in order."""

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens of all requests."""
        return sum(part.num_tokens for part in self.parts)
