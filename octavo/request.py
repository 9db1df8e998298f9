"""A request inside the engine core: its tokens, its progress, its state."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from octavo.messages import CoreSamplingParams, EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything after PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_FSM = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_WAKE_UP = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9

    @property
    def finished(self) -> bool:
        """True if nothing more will come."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """OpenAI's reason, once finished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}

# (priority, round, number of the request in the order of arrival): unique, ties are fair.
QueueKey = tuple[int, int, int]

# Hashes of the full blocks of a request's tokens that are not hashed yet, in order.
BlockHasher = Callable[["Request"], list[bytes]]


class Request:
    """The scheduler's record of one request.

    `num_computed_tokens` catches up with `num_tokens`; that alone drives prefill, chunked prefill,
    decode and recovery after preemption.

    Args:
        core_request: with n = 1; see `fan_out`.
        block_hasher: None if its blocks are not to be found by others.
        block_hashes: those of its tokens, if they are known already.
        cache_scope: blocks are shared only with requests of the same scope; None: with all that
            have none.
        leader: the first of the requests with this very prompt that came together, of which this
            one is another.
    """

    # Python finds the attributes of an object quickly if it has at most thirty, or these.
    __slots__ = (
        "__weakref__",
        "_block_hasher",
        "all_token_ids",
        "block_hashes",
        "cache_scope",
        "competes",
        "error",
        "error_kind",
        "first_scheduled_time",
        "leader",
        "max_tokens",
        "num_cached_tokens",
        "num_charged",
        "num_computed_tokens",
        "num_external_tokens",
        "num_forced",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_spec_in_flight",
        "options",
        "prompt_embeds",
        "queue_key",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        core_request: EngineCoreRequest,
        block_hasher: BlockHasher | None = None,
        block_hashes: list[bytes] | None = None,
        cache_scope: str | None = None,
        leader: Request | None = None,
    ) -> None:
        params = core_request.sampling_params
        self.request_id = core_request.request_id
        self.sampling_params: CoreSamplingParams = params
        self.options = core_request.options
        self.cache_scope = cache_scope
        self.leader = leader
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.all_token_ids = core_request.prompt_token_ids + core_request.output_token_ids
        self.prompt_embeds = core_request.prompt_embeds
        self.max_tokens = params.max_tokens
        self.stop_token_ids = params.all_stop_token_ids

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.error_kind: str | None = None
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache, or will be once the steps in flight have run."""
        self.num_output_placeholders = 0
        """Tokens that steps in flight will sample (async scheduling)."""
        self.num_spec_in_flight = 0
        """Drafts in flight: as many placeholders and computed tokens may come to nothing."""
        self.num_forced = 0
        """Tokens that its grammar leaves no choice of, behind those that steps in flight sample:
        the next step drafts them."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when first scheduled."""
        self.num_preemptions = 0
        self.num_external_tokens: int | None = None
        """Tokens that a KV connector has loaded for it, since it was last preempted; None: it may
        be asked."""
        self.first_scheduled_time: float | None = None
        self.num_charged = self.num_prompt_tokens if core_request.output_token_ids else 0
        """Prompt tokens up to which its tenant has been charged; one that goes on was, once."""
        self.competes = False
        """True if it has not been computed up to its last token yet, not even once."""

        self.queue_key: QueueKey = (self.options.priority, self.options.turn, 0)
        """Order of service, best first; the scheduler sets it by its policy on arrival."""
        self.num_prompt_logprobs = core_request.num_prompt_logprobs
        """Prompt logprobs handed out so far (a resumed request computes them again)."""

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = block_hashes or []
        if block_hasher is not None and block_hashes is None:
            self.block_hashes = block_hasher(self)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def next_deadline(self) -> float:
        """The time at which the request ends if nothing happens; infinite: never."""
        if not self.num_output_tokens:
            return self.options.due
        return math.inf if self.options.deadline is None else self.options.deadline

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Prompt logprobs need the prompt computed, not remembered."""
        return self.sampling_params.prompt_logprobs is not None

    def append_output_token_ids(self, token_ids: list[int]) -> None:
        """Add generated tokens and hashes the blocks that they fill."""
        self.all_token_ids.extend(token_ids)
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def resume(self, token_ids: list[int]) -> None:
        """Has a new request go on behind tokens that another engine made."""
        if token_ids:
            self.append_output_token_ids(token_ids)
            self.num_charged = self.num_prompt_tokens


def fan_out(
    core_request: EngineCoreRequest,
    block_hasher: BlockHasher,
    *,
    enable_prefix_caching: bool = True,
) -> Iterator[Request]:
    """The n requests of a core request, which share all that is long.

    With prefix caching off a single request's blocks are not hashed; those of siblings are, in a
    scope of their own, so that they still share their prompt's blocks.
    """
    if core_request.n == 1:
        yield Request(core_request, block_hasher if enable_prefix_caching else None)
        return
    scope = None if enable_prefix_caching else core_request.request_id
    leader: Request | None = None
    hashes: list[bytes] = []
    for i in core_request.indices:
        child = core_request.child(i)
        known = None if leader is None else hashes.copy()
        request = Request(child, block_hasher, known, scope, leader)
        if leader is None:
            leader, hashes = request, request.block_hashes.copy()
        if core_request.answers is not None:
            request.resume(core_request.answers[i])
        yield request
