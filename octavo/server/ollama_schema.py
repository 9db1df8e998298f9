"""Bodies of Ollama's API, and their conversion to a chat."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError
from octavo.server.body import Body
from octavo.server.chat_messages import Tool, Tools
from octavo.server.errors import show
from octavo.server.schema import ChatBody, Float, Int

LATEST = ":latest"
"""Tag of a model's name that Ollama's clients may add."""

OPTION_NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's options by the names of a chat's fields."""

_LEVELS = ("low", "medium", "high", "max")
# Values of num_predict that set no limit: no end, and up to the end of the context.
_NO_LIMIT = (-1, -2)
_ROLES = ("system", "user", "assistant", "tool")


def _check_format(value: object) -> object:
    if value is None or value == "":
        return None
    if value != "json" and not isinstance(value, dict):
        raise RequestError(
            f'format={show(value)} is not allowed; give "json" or a JSON schema (an object).',
            "format",
        )
    return value


def _check_think(value: object) -> object:
    if value is None or isinstance(value, bool) or value in _LEVELS:
        return value
    raise RequestError(
        f"think={show(value)} is not allowed; give true, false, or one of {', '.join(_LEVELS)}.",
        "think",
    )


def _check_num_predict(value: int) -> int:
    if value < 1 and value not in _NO_LIMIT:
        raise RequestError(
            f"options.num_predict={value} is not allowed; give 1 or more, or -1 or -2 for as many "
            "tokens as the context has room for.",
            "options.num_predict",
        )
    return value


class Options(Body):
    """Parameters of an answer. The server ignores Ollama's other options, and reports them."""

    temperature: Float | None = None
    """Divisor of the logits; 0: greedy. Default: the model's."""
    top_k: Int | None = None
    """Number of tokens to sample from."""
    top_p: Float | None = None
    """Share of probability of the tokens to sample from."""
    min_p: Float | None = None
    """Least probability of a token to sample, as a share of the most probable token's."""
    seed: Int | None = None
    """Seed of the random numbers; -1: another one for each request."""
    num_predict: Annotated[Int, AfterValidator(_check_num_predict)] | None = None
    """Maximum tokens of the answer; -1 or -2: as many as the context has room for. Default -1."""
    stop: str | list[str] | None = None
    """Texts that end the answer."""
    repeat_penalty: Float | None = None
    """Divisor of the logits of tokens that the prompt or the answer has. Default 1."""
    presence_penalty: Float | None = None
    """Number that is subtracted from the logits of tokens of the answer."""
    frequency_penalty: Float | None = None
    """Number that is subtracted from a token's logit each time that the answer has the token."""
    num_ctx: Annotated[Int, Field(ge=1)] | None = None
    """Context in tokens that the client needs. More than the server's is an error; less has no
    effect."""


class OllamaBody(Body):
    """Fields of both POST /api/chat and POST /api/generate."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"options": Options}

    model: Annotated[str, Field(min_length=1)]
    """Served model name, also with the tag `:latest`."""
    stream: bool | None = None
    """Stream the answer as lines of JSON. Default true."""
    format: Annotated[Any, BeforeValidator(_check_format)] = None
    """json, or a JSON schema that the answer follows."""
    options: Options | None = None
    """Parameters of the answer."""
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None, BeforeValidator(_check_think)
    ] = None
    """Reasoning of the model: true, false, or a level that the chat template knows. Default: the
    chat template's."""
    keep_alive: float | str | None = None
    """No effect: the model stays loaded."""
    logprobs: bool | None = None
    """Return the logprobs of each token."""
    top_logprobs: Int | None = None
    """Number of most probable tokens with logprobs; needs logprobs."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Scope of cached prefixes: requests with another one share none; vLLM."""
    explain: bool | None = None
    """Explain the time of the request in its answer, or in the last line of its stream, as
    explanation; see docs/explain.md."""

    @property
    def streams(self) -> bool:
        """True if the answer is a stream."""
        return self.stream is not False

    @abstractmethod
    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""

    def to_chat(self, model: str) -> ChatBody:
        """Return the body of a chat completion with a served model.

        Raises:
            RequestError: the fields do not fit together.
        """
        messages = self.conversation()
        chat: dict[str, Any] = {"messages": messages, "model": model, "stream": self.streams}
        if messages[-1]["role"] == "assistant":
            chat["continue_final_message"] = True
        if isinstance(self.think, bool):
            chat["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            chat["reasoning_effort"] = self.think
        if self.format == "json":
            chat["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            schema = {"name": "format", "schema": self.format}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        chat |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        chat |= {"cache_salt": self.cache_salt, "explain": self.explain}
        if self.options is not None:
            for name, option in OPTION_NAMES.items():
                chat[name] = getattr(self.options, option)
            if chat["max_tokens"] in _NO_LIMIT:
                chat["max_tokens"] = None
        return self.complete(chat)

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat, with the fields of subclasses."""
        return ChatBody.checked(chat)


# Messages


def _check_messages(value: object) -> object:
    if not isinstance(value, list):
        raise RequestError(
            f"messages={show(value)} is not allowed; give a list of messages.", "messages"
        )
    converted = [_convert_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    _number_calls(converted)
    return converted


def _convert_message(message: object, where: str) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    if not isinstance(message, dict):
        raise RequestError(
            f'{where}={show(message)} is not a message; give {{"role": "user", "content": "..."}}.',
            where,
        )
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role={show(role)} is not allowed; use {', '.join(_ROLES)}.", f"{where}.role"
        )
    words = _text(message, "content", where) or ""
    pictures = _check_images(message.get("images"), f"{where}.images")
    converted: dict[str, Any] = {"role": role, "content": _with_images(words, pictures)}
    if role == "assistant":
        thought = _text(message, "thinking", where)
        if thought:
            converted["reasoning"] = thought
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            at = f"{where}.tool_calls"
            raise RequestError(f"{at}={show(calls)} is not a list of calls.", at)
        if calls:
            converted["tool_calls"] = [
                _convert_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
    if role == "tool":
        for given, name in (("tool_name", "name"), ("tool_call_id", "tool_call_id")):
            text = _text(message, given, where)
            if text:
                converted[name] = text
    return converted


def _check_images(value: object, where: str = "images") -> list[str] | None:
    """Return pictures in base64.

    Raises:
        RequestError: the value is no list of texts.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(image, str) for image in value):
        raise RequestError(
            f"{where}={show(value)} is not allowed; give a list of pictures in base64.", where
        )
    return value


def _with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return a content in OpenAI's form; pictures come before the text, as in Ollama."""
    if not images:
        return text
    urls = (image if image[:5] == "data:" else f"data:;base64,{image}" for image in images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _text(message: Mapping[str, Any], name: str, where: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{where}.{name}={show(value)} is not a string.", f"{where}.{name}")
    return value


def _convert_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(
            f'{where}={show(call)} is not a call; give {{"function": {{"name": "...", '
            '"arguments": {...}}}.',
            where,
        )
    name, arguments = _text(function, "name", f"{where}.function"), function.get("arguments")
    if not name:
        raise RequestError(f"{where}.function.name is missing.", f"{where}.function.name")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        at = f"{where}.function.arguments"
        raise RequestError(f"{at}={show(arguments)} is not an object.", at)
    text = json.dumps(arguments, ensure_ascii=False)
    converted: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
    if given := _text(call, "id", where):
        converted["id"] = given
    return converted


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Add the ids that Ollama's clients leave out, to calls and to their results.

    A result belongs to the first unanswered call of its tool, or, without a tool's name, to the
    first unanswered call. Some chat templates need ids of nine letters and digits.
    """
    calls: list[dict[str, Any]] = []
    answered: set[int] = set()
    queues: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
    """Numbers of the calls in order: all, and those with each id and each name."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call.setdefault("id", f"call{len(calls):05}")
            for key in (("", ""), ("id", call["id"]), ("name", call["function"]["name"])):
                queues[key].append(len(calls))
            calls.append(call)
        if message["role"] != "tool":
            continue
        key = ("", "")
        if "tool_call_id" in message:
            key = ("id", message["tool_call_id"])
        elif "name" in message:
            key = ("name", message["name"])
        queue = queues[key]
        while queue and queue[0] in answered:
            queue.popleft()
        if queue:
            answered.add(queue[0])
            call = calls[queue[0]]
            message.setdefault("tool_call_id", call["id"])
            message.setdefault("name", call["function"]["name"])


class OllamaChatBody(OllamaBody):
    """Body of POST /api/chat."""

    inner: ClassVar[Mapping[str, type[Body]]] = {**OllamaBody.inner, "tools": Tool}

    messages: Annotated[list[dict[str, Any]], BeforeValidator(_check_messages)] = Field(
        default_factory=list
    )
    """Messages of the chat. Without messages, the answer says that the model is loaded."""
    tools: Tools = None
    """Definitions of the tools that the model may call."""

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        return list(self.messages)

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat; see `OllamaBody.complete`."""
        if self.tools:
            chat["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
        return super().complete(chat)


class OllamaGenerateBody(OllamaBody):
    """Body of POST /api/generate."""

    unsupported = known_fields.OLLAMA_GENERATE

    prompt: str | None = None
    """Message of the user. Without it, the answer says that the model is loaded."""
    system: str | None = None
    """System message."""
    images: Annotated[list[str] | None, BeforeValidator(_check_images)] = None
    """Pictures in base64, which come before the prompt."""
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        content = self.prompt if self.prompt is None else _with_images(self.prompt, self.images)
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat; see `OllamaBody.complete`.

        Raises:
            RequestError: raw excludes a given field.
        """
        for name in ("system", "think", "images"):
            value = getattr(self, name)
            if self.raw and value not in (None, "", False, []):
                raise RequestError(
                    f"{name}={show(value)} needs the chat template, which raw=true leaves out; "
                    "leave one of them out.",
                    name,
                )
        return super().complete(chat)


class ShowBody(Body):
    """Body of POST /api/show."""

    model: str | None = None
    """Served model name, also with the tag `:latest`."""
    name: str | None = None
    """Older name of model."""
    verbose: bool | None = None
    """No effect."""
