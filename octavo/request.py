"""Request inside the engine core: its tokens, its progress, its state."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from octavo.guard import Guard
from octavo.messages import CoreSamplingParams, EngineCoreRequest, FinishReason, PoolingSpec


class RequestStatus(enum.IntEnum):
    """State of a request. All states after PREEMPTED are final."""

    WAITING = 0
    WAITING_FOR_FSM = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_WAKE_UP = 3
    WAITING_FOR_ADAPTER = 4
    WAITING_FOR_ADAPTER_TURN = 5
    WAITING_FOR_ENCODER = 6
    RUNNING = 7
    PREEMPTED = 8
    FINISHED_STOPPED = 9
    FINISHED_LENGTH_CAPPED = 10
    FINISHED_ABORTED = 11
    FINISHED_ERROR = 12
    FINISHED_REPETITION = 13

    @property
    def finished(self) -> bool:
        """True if no more outputs will follow."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """OpenAI's reason; None before the end."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}

# (priority, round, number in the order of arrival): unique; ties are fair.
QueueKey = tuple[int, int, int]

# Hashes of the full blocks of a request's tokens that have no hash yet, in order.
BlockHasher = Callable[["Request"], list[bytes]]


class Request:
    """Scheduler's record of one request.

    `num_computed_tokens` catches up with `num_tokens`; that alone drives prefill, chunked prefill,
    decode and recovery after preemption.

    Args:
        core_request: a request with n = 1; see `fan_out`.
        block_hasher: hashes blocks; None if other requests must not find its blocks.
        block_hashes: hashes of its tokens' blocks, if already known.
        cache_scope: blocks are shared only with requests of the same scope; None: with all other
            requests without a scope.
        leader: the first of the simultaneous requests with the same prompt, if this is another one.
    """

    # Python finds an object's attributes quickly if it has at most thirty, or uses slots.
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
        "guard",
        "has_news",
        "leader",
        "max_tokens",
        "mm_end",
        "mm_features",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_charged",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_external_tokens",
        "num_forced",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_spec_in_flight",
        "num_stored_tokens",
        "options",
        "pooling",
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
        self.mm_features = core_request.mm_features
        """Items of the prompt, in order of their places."""
        self.mm_end = max((f.end for f in self.mm_features), default=0)
        """Index after the last token of an item, or of its ranges; 0 without items."""
        self.pooling: PoolingSpec | None = core_request.pooling
        """Result in place of tokens; None: the request generates tokens."""
        self.guard: Guard | None = None
        """Guard of the answer; None: it has no limits."""
        if params.guard is not None:
            self.guard = Guard(params.guard, core_request.output_token_ids)
        self.max_tokens = params.max_tokens
        self.stop_token_ids = params.all_stop_token_ids

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.error_kind: str | None = None
        self.num_computed_tokens = 0
        """Number of tokens with KV in the cache, or there after the steps in flight."""
        self.num_output_placeholders = 0
        """Number of tokens that steps in flight will sample (async scheduling)."""
        self.num_spec_in_flight = 0
        """Number of drafts in flight; each may cost a placeholder and a computed token."""
        self.num_forced = 0
        """Number of tokens that its grammar forces after those that steps in flight sample: the
        next step drafts them."""
        self.num_cached_tokens = 0
        """Number of prompt tokens found in the prefix cache when first scheduled."""
        self.num_stored_tokens = 0
        """Number of prompt tokens with cached keys and values at that time."""
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        """Number of drafts proposed for it."""
        self.num_accepted_tokens = 0
        """Number of accepted ones."""
        self.num_external_tokens: int | None = None
        """Number of tokens that a KV connector has loaded since the last preemption; None: the
        connector may be queried."""
        self.first_scheduled_time: float | None = None
        self.has_news = True
        """True if its statistics have changed since the last output with a token."""
        self.num_charged = self.num_prompt_tokens if core_request.output_token_ids else 0
        """Prompt tokens charged to its tenant so far; a resumed request was charged before."""
        self.competes = False
        """True until it has been computed up to its last token once."""

        self.queue_key: QueueKey = (self.options.priority, self.options.turn, 0)
        """Order of service, lowest first; the scheduler sets it by its policy on arrival."""
        self.num_prompt_logprobs = core_request.num_prompt_logprobs
        """Number of reported prompt logprobs (a resumed request computes them again)."""

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = block_hashes or []
        if block_hasher is not None and block_hashes is None:
            self.block_hashes = block_hasher(self)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def next_deadline(self) -> float:
        """Time at which the request ends without progress; infinite: never."""
        if not self.num_output_tokens:
            return self.options.due
        return math.inf if self.options.deadline is None else self.options.deadline

    @property
    def shares_blocks(self) -> bool:
        """True if other requests may find its blocks by their hashes."""
        return self._block_hasher is not None

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if the result needs all tokens of the prompt computed: prompt logprobs, pooling."""
        if self.pooling is not None:
            return self.pooling.reads_all
        return self.sampling_params.prompt_logprobs is not None

    @property
    def whole(self) -> bool:
        """True if one step must compute the whole prompt."""
        return self.pooling is not None and self.pooling.whole

    def append_output_token_ids(self, token_ids: list[int]) -> None:
        """Add generated tokens and hash the blocks that they fill."""
        self.all_token_ids.extend(token_ids)
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def resume(self, token_ids: list[int]) -> None:
        """Continue a new request after tokens that another engine generated."""
        if token_ids:
            self.append_output_token_ids(token_ids)
            if self.sampling_params.guard is not None:
                self.guard = Guard(self.sampling_params.guard, token_ids)
            self.num_charged = self.num_prompt_tokens


def fan_out(
    core_request: EngineCoreRequest,
    block_hasher: BlockHasher,
    *,
    enable_prefix_caching: bool = True,
) -> Iterator[Request]:
    """Yield the n requests of a core request, which share all long data.

    Without prefix caching the blocks of a single request are not hashed. Those of siblings are, in
    a dedicated scope, so that the siblings still share their prompt's blocks.
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
