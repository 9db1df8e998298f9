"""Answers of OpenAI's Responses and Conversations APIs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from octavo.server.answers import Answer
from octavo.server.explain_answers import Explained


class ResponseError(Answer):
    """Reason why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Part of `ResponseUsage`."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Part of `ResponseUsage`."""

    reasoning_tokens: int
    """Tokens of the text of the reasoning."""


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ConversationId(Answer):
    """Conversation of a response."""

    id: str


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseReasoning(Answer):
    """Settings of the reasoning."""

    effort: str | None
    summary: str | None


class ResponseObject(Explained):
    """POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    """Items: reasoning, message and function_call."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationId | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


@with_config(ConfigDict(extra="allow", strict=True))
class ResponseEvent(TypedDict):
    """Event of a stream of /v1/responses; its type determines the other fields."""

    type: str
    sequence_number: int
    """Number of the event, counted from 0."""


class ResponseInputTokens(Answer):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Answer):
    """Page of a list of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Conversation(Answer):
    """POST /v1/conversations."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


@with_config(ConfigDict(extra="allow", strict=True))
class Item(TypedDict):
    """Item of a conversation."""

    id: str
    type: str
