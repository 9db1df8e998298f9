"""Answers that explain a request: where its time went, and what it did not find in the cache."""

from __future__ import annotations

from typing import Literal, NotRequired

from octavo.server.answers import Answer


class CacheMiss(Answer):
    """Reason why at least 256 tokens of the prompt were not in the cache though a recent prompt of
    the same key has them, or was the same but for a part."""

    reason: Literal["changed", "forgotten", "no_state", "emptied", "other_adapter"]
    """changed: this prompt differs; forgotten: the cache has used the blocks for others; no_state:
    it has the blocks, but no recurrent state; emptied: the cache was emptied, as by the end of an
    engine; other_adapter: the recent prompt ran with another adapter, or only one of
    the two had one."""
    token: int
    """Index of the first token that differs, or that was not in the cache."""
    message: int | None
    """Index of the chat's message with this token; null: before the first one, or unknown."""
    known_tokens: int
    """changed: number of tokens of the recent prompt with its answer; else of those in common."""
    seconds: float
    """emptied: seconds since then; else seconds since the tokens were last used."""


class PromptDifference(Answer):
    """Place where the prompt differs from the most alike recent prompt of the same key."""

    volatile: str | None
    """Kind of text that changes there in many prompts: a date or time, an id, an agent's billing
    header; null: none of these."""
    text: NotRequired[str | None]
    """Text around the first token that differs, with --explain-prompts."""
    earlier_text: NotRequired[str | None]
    """Text of the earlier prompt there."""


class OtherRequest(Answer):
    """Another request that the client may see."""

    number: str
    """Its number, as in the engine view."""
    id: NotRequired[str | None]
    """Id of its answer, while it is recorded."""
    ms: NotRequired[float | None]
    tokens: NotRequired[int | None]
    blocks: NotRequired[int | None]


class GivenUpBlocks(Answer):
    """Blocks of the prompt's prefix that the cache gave up for another request."""

    seconds_before: float
    """Seconds between that and the arrival of the request."""
    token: int
    """Index of the first token of the first of these blocks."""
    by: OtherRequest | None
    """That request; null: the client may not see it."""


class ExplainedCache(Answer):
    """Cached and computed tokens of the prompts, and why not more were in the cache."""

    prompt_tokens: int
    cached_tokens: int
    miss: CacheMiss | None
    difference: PromptDifference | None
    given_up: GivenUpBlocks | None
    text: list[str]
    """The same in sentences, without texts of prompts."""


class ExplainedSpan(Answer):
    """Part of the time line, with one cause."""

    cause: str
    begin_ms: float
    """Milliseconds since the arrival of the request."""
    ms: float
    text: str
    reason: NotRequired[str | None]
    """With queued: SEAT, BUDGET, BLOCKS, LEADER, REMOTE_KVS or IN_FLIGHT."""
    is_behind: NotRequired[bool | None]
    """With queued: true if the reason is that of another request, which was the first in the
    queue."""
    steps: NotRequired[int | None]
    tokens: NotRequired[int | None]
    """Number of computed tokens of this request."""
    others: NotRequired[int | None]
    """Most other requests in one of the steps."""
    who: NotRequired[list[OtherRequest] | None]
    """Other requests that are the cause, at most 8: with their tokens in the steps; with queued for
    BUDGET the most tokens in a step, for BLOCKS the most KV blocks; otherwise the time."""
    more: NotRequired[int | None]
    """Number of further ones, and of those that the client may not see."""
    behind: NotRequired[list[OtherRequest] | None]
    """With is_behind: those that were the first in the queue, as far as the client may see them."""
    theirs_ms: NotRequired[float | None]
    """Share of the steps' time, by tokens, of the other requests."""
    between_ms: NotRequired[float | None]
    """Time between the steps; in causes it belongs to between_steps."""


class ExplainedCause(Answer):
    """All time with one cause."""

    cause: str
    ms: float
    text: str


class ExplainedAnswer(Answer):
    """Answer to a prompt, by the engine's steps."""

    number: str
    """Its number in the engine view."""
    prompt: int
    index: int
    followed: bool
    """True if the time line is that of this answer: it ended last."""
    begin_ms: float
    end_ms: float
    steps: int
    prompt_chunks: int
    """Number of the steps that computed the prompt."""
    computed_tokens: int
    cached_tokens: int
    preemptions: int


class Advice(Answer):
    """Setting that would have helped."""

    setting: str
    text: str
    saved_ms: float | None
    estimate: Literal["at_most", "simulated", "unknown"]
    """at_most: the time of the causes that the setting removes; simulated: by a simulation of the
    requests of that time."""


class RecentRequest(Answer):
    """Recent request."""

    id: str
    """Id of the answer."""
    request_id: str
    path: str
    model: str
    created: float
    """Arrival in seconds since 1970."""
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    status: int | None
    """HTTP status; null: none was sent yet."""
    finished: bool


class RecentRequests(Answer):
    """GET /v1/requests."""

    object: Literal["list"]
    data: list[RecentRequest]


class Explanation(RecentRequest):
    """GET /v1/requests/{request_id}/explain."""

    object: Literal["request.explanation"]
    wall_ms: float
    first_token_ms: float | None
    timeline: list[ExplainedSpan]
    """Parts in order, without gaps: they sum to wall_ms."""
    causes: list[ExplainedCause]
    """Time by cause, the longest first: they sum to wall_ms, too."""
    answers: list[ExplainedAnswer]
    cache: ExplainedCache
    advice: list[Advice]


class Explained(Answer):
    """Base of answers, and of last chunks, that explain their request."""

    explanation: NotRequired[Explanation | None]
    """With explain."""
