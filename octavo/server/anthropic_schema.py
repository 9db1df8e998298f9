"""Bodies of Anthropic's Messages API, and their conversion to a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError, UnsupportedError
from octavo.server.body import Body
from octavo.server.chat_messages import MAX_TOOLS
from octavo.server.errors import show
from octavo.server.schema import ChatBody, Float, Int

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# Names of a chat completion's fields, and Anthropic's.
_NAMES = (
    (re.compile(r"^stop(?=$|[^\w])"), "stop_sequences"),
    (re.compile(r"(?<=tools\[)(\d+)\]\.function\.parameters"), r"\1].input_schema"),
    (re.compile(r"(?<=tools\[)(\d+)\]\.function\."), r"\1]."),
    (re.compile(r"tool_choice\.function\.name"), "tool_choice.name"),
    (re.compile(r"^thinking_token_budget(?=$|[^\w])"), "thinking.budget_tokens"),
    (re.compile(r"^chat_template_kwargs(?=$|[^\w])"), "thinking"),
)


# Line of Claude Code before the system prompt, with a new value in each request.
_NOISE = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")


def without_client_noise(system: str) -> str:
    """Return a system prompt without the header lines that a client writes before it."""
    return _NOISE.sub("", system)


def renamed(error: RequestError) -> RequestError:
    """Return an error of a chat completion with Anthropic's names of the fields."""
    for pattern, name in _NAMES:
        error.message = pattern.sub(name, error.message)
        if error.param is not None:
            error.param = pattern.sub(name, error.param)
    return error


def _check_system(value: object) -> object:
    return value if value is None else _text_of(value, "system")


def _text_of(value: object, where: str) -> str:
    """Return a text, or the joined texts of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(
            f"{where}={show(value)} is not allowed; give a string or a list of text blocks.", where
        )
    return "\n".join(_text_block(block, f"{where}[{i}]") for i, block in enumerate(value))


def _content_of(value: object, where: str) -> str | list[dict[str, Any]]:
    """Return a content in OpenAI's form: text, or a list of parts if there are pictures."""
    if not isinstance(value, list):
        return _text_of(value, where)
    parts = [_part(block, f"{where}[{i}]", "text or image") for i, block in enumerate(value)]
    return parts if any(map(_is_picture, value)) else "\n".join(part["text"] for part in parts)


def _is_picture(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _part(block: Any, where: str, kinds: str) -> dict[str, Any]:
    """Return a text or a picture in OpenAI's form; `kinds` are those to use, for errors."""
    if not _is_picture(block):
        return {"type": "text", "text": _text_block(block, where, kinds)}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return {"type": "image_url", "image_url": {"url": _field(source, "url", f"{where}.source")}}
    if kind == "base64":
        data = _field(source, "data", f"{where}.source")
        return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}
    raise UnsupportedError(
        f"{where}.source.type={show(kind)} is not supported; use base64 or url.",
        f"{where}.source.type",
    )


def _text_block(block: object, where: str, kinds: str = "text") -> str:
    if not isinstance(block, dict):
        raise RequestError(f"{where}={show(block)} is not a block.", where)
    kind = block.get("type")
    if kind != "text":
        raise UnsupportedError(
            f"{where}.type={show(kind)} is not supported here; use {kinds}.", f"{where}.type"
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text={show(text)} is not a string.", f"{where}.text")
    return text


_KINDS = {
    "user": "text, image or tool_result",
    "assistant": "text, image, tool_use or thinking",
}
"""Types of the blocks of a message by its role, for errors."""


def _check_messages(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"messages={show(value)} is not allowed; give a list of one or more messages.",
            "messages",
        )
    return [
        converted
        for i, message in enumerate(value)
        for converted in _convert_message(message, f"messages[{i}]")
    ]


def _convert_message(message: object, where: str) -> list[dict[str, Any]]:
    """Return a message in OpenAI's form: results of tools become messages of their own."""
    if not isinstance(message, dict):
        raise RequestError(
            f'{where}={show(message)} is not a message; give {{"role": "user", "content": "..."}}.',
            where,
        )
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"{where}.role={show(role)} is not allowed; use user or assistant.", f"{where}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content={show(content)} is not allowed; give a string or a list of blocks.",
            f"{where}.content",
        )
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_convert_call(block, at))
        elif kind == "tool_result" and role == "user":
            results.append(_convert_result(block, at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_field(block, "thinking", at))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # only the service that wrote it can read it
        else:
            parts.append(_part(block, at, _KINDS.get(role, "text or image")))
    converted: list[dict[str, Any]] = results
    if parts or calls or thoughts or not results:
        # A list of texts becomes one text when the chat is checked.
        converted.append({"role": role, "content": parts})
        if calls:
            converted[-1]["tool_calls"] = calls
        if thoughts:
            converted[-1]["reasoning"] = "\n".join(thoughts)
    return converted


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}={show(value)} is not a string.", f"{where}.{name}")
    return value


def _convert_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.input={show(arguments)} is not an object.", f"{where}.input")
    name = _field(block, "name", where)
    return {
        "id": _field(block, "id", where),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _convert_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    return {
        "role": "tool",
        "tool_call_id": _field(block, "tool_use_id", where),
        "content": "" if content is None else _content_of(content, f"{where}.content"),
    }


class AnthropicTool(Body):
    """Tool of the client."""

    unsupported = known_fields.ANTHROPIC_TOOL

    name: str
    """Name of the tool."""
    description: str | None = None
    """Purpose of the tool."""
    input_schema: dict[str, Any]
    """JSON schema of the input."""


class AnthropicToolChoice(Body):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: the model decides; any: it calls at least one; tool: it calls `name`; none."""
    name: str | None = None
    """Tool to call, with type tool."""
    disable_parallel_tool_use: bool | None = None
    """Allow at most one call."""


class Thinking(Body):
    """Reasoning of the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    """disabled: no reasoning, if the chat template supports that."""
    budget_tokens: Annotated[Int, Field(ge=0)] | None = None
    """Maximum tokens of reasoning, with type enabled; no effect if the end of the model's reasoning
    is no token of its own."""


class OutputFormat(Body):
    """Form of the answer."""

    type: Literal["json_schema"]
    """Kind of the form."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """JSON schema of the answer."""


class OutputConfig(Body):
    """Effort and form of the answer."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"format": OutputFormat}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Variable reasoning_effort of the chat template."""
    format: OutputFormat | None = None
    """Required form of the answer."""


class CountTokensBody(Body):
    """Body of POST /v1/messages/count_tokens."""

    unsupported = known_fields.ANTHROPIC
    inner: ClassVar[Mapping[str, type[Body]]] = {
        "tools": AnthropicTool,
        "tool_choice": AnthropicToolChoice,
        "thinking": Thinking,
        "output_config": OutputConfig,
    }

    model: str | None = None
    """Served model name; default: the first one."""
    messages: Annotated[list[dict[str, Any]], BeforeValidator(_check_messages)]
    """Messages of the chat: text, image, tool_use, tool_result and thinking blocks."""
    system: Annotated[str | None, BeforeValidator(_check_system)] = None
    """System prompt: a text, or a list of text blocks."""
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tools that the model may call."""
    tool_choice: AnthropicToolChoice | None = None
    """Choice of tools."""
    thinking: Thinking | None = None
    """Reasoning of the model."""
    output_config: OutputConfig | None = None
    """Effort and form of the answer."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Scope of cached prefixes: requests with another one share none; vLLM."""

    def to_chat(self) -> ChatBody:
        """Return the body of a chat completion.

        Raises:
            RequestError: the fields do not fit together.
        """
        messages = list(self.messages)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        chat: dict[str, Any] = {"messages": messages, "model": self.model}
        if messages[-1]["role"] == "assistant":
            chat["continue_final_message"] = True
        if self.tools:
            chat["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                    },
                }
                for tool in self.tools
            ]
        choice = self.tool_choice
        if choice is not None:
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
            if choice.type == "tool":
                if choice.name is None:
                    raise RequestError(
                        "tool_choice.name is missing; type tool needs it.", "tool_choice.name"
                    )
                chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            elif self.tools or choice.type == "any":
                chat["tool_choice"] = _CHOICES[choice.type]
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            chat["chat_template_kwargs"] = {"enable_thinking": thinks}
            if self.thinking.type == "enabled":
                chat["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None:
            chat["reasoning_effort"] = self.output_config.effort
            if (form := self.output_config.format) is not None:
                schema = {"name": "format", "schema": form.schema_}
                chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return self.complete(chat)

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat, with the fields of subclasses."""
        return ChatBody.checked(chat | {"cache_salt": self.cache_salt})


class MessagesBody(CountTokensBody):
    """Body of POST /v1/messages."""

    max_tokens: Int
    """Maximum tokens of the answer."""
    stream: bool | None = None
    """Stream the answer as server-sent events."""
    stop_sequences: list[str] | None = None
    """Texts that end the answer."""
    temperature: Float | None = None
    """Divisor of the logits; 0: greedy."""
    top_p: Float | None = None
    """Share of probability of the tokens to sample from."""
    top_k: Int | None = None
    """Number of tokens to sample from."""
    explain: bool | None = None
    """Explain the time of the request in its answer, or in the event message_stop of its stream, as
    explanation; see docs/explain.md."""

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat; see `CountTokensBody.complete`."""
        chat |= {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "explain": self.explain,
        }
        return super().complete(chat)
