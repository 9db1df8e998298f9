"""Answers of the routes that generate: completions, chats and tokens."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from octavo.server.answers import Answer
from octavo.server.explain_answers import CacheMiss, Explained


class PromptTokensDetails(Answer):
    """Part of `Usage`."""

    cached_tokens: int
    cache_miss: NotRequired[CacheMiss]


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class PerRequestMetrics(Answer):
    """Times of the request, with --enable-per-request-metrics or return_metrics, and counts with
    return_metrics. Unknown times are null; a stream leaves them out."""

    time_to_first_token_ms: NotRequired[float | None]
    """Time of the prompt: from the first step to the first token."""
    generation_time_ms: NotRequired[float | None]
    queue_time_ms: NotRequired[float | None]
    mean_itl_ms: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    num_cached_tokens: NotRequired[int]
    num_preemptions: NotRequired[int]
    num_draft_tokens: NotRequired[int]
    """Number of drafts proposed."""
    num_accepted_tokens: NotRequired[int]
    """Number of accepted drafts."""


class PromptProgress(Answer):
    """Part of a prompt that has been computed, in chunks before the first token."""

    total: int
    """Number of tokens of the prompt."""
    cache: int
    """Number of them from the cache."""
    processed: int
    """Number of them that are computed or from the cache."""
    time_ms: float
    """Time since the first step with the prompt."""


class Envelope(Answer):
    """Fields of all answers and chunks of the generation endpoints."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptLogprob(Answer):
    """Candidate token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


FinishReason = Literal["stop", "length", "abort"]


ChatFinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call"]


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class CompletionAnswer(Envelope, Explained):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[PerRequestMetrics | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]


class CompletionChunkChoice(Answer):
    """New part of a text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class CompletionChunk(Envelope, Explained):
    """Event of a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[PerRequestMetrics | None]
    prompt_progress: NotRequired[PromptProgress | None]


class Candidate(Answer):
    """Token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Candidate):
    """Token of the answer, and the most probable candidates at its position."""

    top_logprobs: list[Candidate]


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Answer):
    """Function of a tool call."""

    name: str
    arguments: str
    """JSON text that the model wrote; it may be cut at the length limit."""


class ToolCall(Answer):
    """Call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """Message of the answer."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: NotRequired[str | None]
    """The same as `reasoning`."""
    tool_calls: NotRequired[list[ToolCall] | None]
    function_call: NotRequired[CalledFunction | None]
    """Call, for a request with functions."""


class ChatChoice(Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class ChatAnswer(Envelope, Explained):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: NotRequired[PerRequestMetrics | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CalledFunctionDelta(Answer):
    """New part of a call's function."""

    name: NotRequired[str | None]
    arguments: NotRequired[str | None]


class ToolCallDelta(Answer):
    """New part of a tool call; its id, type and name come with the first part."""

    index: int
    """Number of the call in the message."""
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunctionDelta


class ChatDelta(Answer):
    """New part of a message."""

    role: NotRequired[str | None]
    content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta] | None]
    function_call: NotRequired[CalledFunctionDelta | None]


class ChatChunkChoice(Answer):
    """New part of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class ChatChunk(Envelope, Explained):
    """Event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[PerRequestMetrics | None]
    prompt_progress: NotRequired[PromptProgress | None]
    prompt_token_ids: NotRequired[list[int] | None]


class TokenLogprob(Answer):
    """Candidate token."""

    token_id: int
    logprob: float
    rank: int | None


class ChosenTokenLogprob(TokenLogprob):
    """Token of an answer, with the candidates at its position."""

    top_logprobs: list[TokenLogprob]


class TokensLogprobs(Answer):
    """Logprobs of an answer's tokens."""

    content: list[ChosenTokenLogprob]


class TokensChunkChoice(Answer):
    """New part of an answer."""

    index: int
    token_ids: list[int]
    logprobs: TokensLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    text: NotRequired[str | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class TokensAnswer(Answer):
    """POST /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChunkChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: NotRequired[dict[str, Any] | None]


class TokensChunk(Answer):
    """Event of a stream of /inference/v1/generate."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int] | None]
