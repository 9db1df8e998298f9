"""Answers of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from octavo.server.answers import Answer
from octavo.server.explain_answers import Explained


class ContentBlock(Answer):
    """Block of an Anthropic message: text, thinking, or tool_use with id, name and input."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str | None]
    thinking: NotRequired[str | None]
    signature: NotRequired[str | None]
    """Empty: no service has to verify the reasoning."""
    id: NotRequired[str | None]
    name: NotRequired[str | None]
    input: NotRequired[dict[str, Any] | None]


class AnthropicUsage(Answer):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that were cached."""
    output_tokens: int


AnthropicStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Explained):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: AnthropicStopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicDelta(Answer):
    """New part of a block, or the end of the message."""

    type: NotRequired[
        Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None
    ]
    text: NotRequired[str | None]
    thinking: NotRequired[str | None]
    signature: NotRequired[str | None]
    partial_json: NotRequired[str | None]
    stop_reason: NotRequired[AnthropicStopReason | None]
    stop_sequence: NotRequired[str | None]


class AnthropicEvent(Explained):
    """Event of a stream of /v1/messages."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: NotRequired[AnthropicMessage | None]
    index: NotRequired[int | None]
    content_block: NotRequired[ContentBlock | None]
    delta: NotRequired[AnthropicDelta | None]
    usage: NotRequired[AnthropicUsage | None]


class AnthropicErrorDetail(Answer):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicError(Answer):
    """Body of every error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class InputTokens(Answer):
    """POST /v1/messages/count_tokens."""

    input_tokens: int
