"""Bodies of OpenAI's Responses API, and their conversion to a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError, UnsupportedError
from octavo.server.body import Body
from octavo.server.chat_messages import MAX_TOOLS
from octavo.server.errors import show
from octavo.server.response_items import (
    Item,
    full_name,
    read_input,
    read_items,
    to_messages,
)
from octavo.server.schema import ChatBody, Float, Int

MAX_METADATA = 16
MAX_NEW_ITEMS = 20
MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of include; those of items that no response here has, have no effect."""
_CHAT_NAMES = {
    r"messages(\[\d+\]\S*)?": "input",
    "max_tokens": "max_output_tokens",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"(tools\[\d+\])\.function": r"\1",
}


def _check_input(value: object) -> object:
    return value if value is None else read_input(value)


def _check_items(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_NEW_ITEMS:
        raise RequestError(
            f"items has {len(value)} items; at most {MAX_NEW_ITEMS} are allowed at once.", "items"
        )
    return read_items(value, "items")


def _check_tools(value: object) -> object:
    if not isinstance(value, list):
        return value
    for i, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            _check_namespace(tool, f"tools[{i}]")
        elif kind != "function":
            raise _no_function(kind, f"tools[{i}].type")
    return value


def _check_namespace(tool: dict[str, Any], where: str) -> None:
    found = tool.get("tools")
    if not isinstance(found, list) or not found:
        raise RequestError(
            f"{where}.tools={show(found)} is not allowed; a namespace has a list of one or more "
            "functions.",
            f"{where}.tools",
        )
    for i, inner in enumerate(found):
        kind = inner.get("type") if isinstance(inner, dict) else None
        if kind != "function":
            raise _no_function(kind, f"{where}.tools[{i}].type")


def _no_function(kind: object, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}={show(kind)} is not supported; the server has no tools of its own, send "
        '{"type": "function", "name": "...", "parameters": {...}}, and switch such tools off in '
        "the client.",
        where,
    )


def _check_choice(value: object) -> object:
    if value is None or value in ("auto", "none", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("function", "allowed_tools"):
        raise UnsupportedError(
            f"tool_choice={show(kind)} is not supported; use auto, none, required, or an object of "
            "type function or allowed_tools.",
            "tool_choice",
        )
    if kind == "function":
        _check_name(value, "tool_choice")
        return value
    if value.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"tool_choice.mode={show(value.get('mode'))} is not allowed; use auto or required.",
            "tool_choice.mode",
        )
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise RequestError(
            f"tool_choice.tools={show(tools)} is not allowed; give a list of one or more tools.",
            "tool_choice.tools",
        )
    for i, tool in enumerate(tools):
        at = f"tool_choice.tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise UnsupportedError(
                f'{at}={show(tool)} is not supported; send {{"type": "function", "name": "..."}}.',
                at,
            )
        _check_name(tool, at)
    return value


def _check_name(tool: Mapping[str, Any], where: str) -> None:
    for field in ("name", "namespace"):
        value = tool.get(field)
        if not isinstance(value, str) and not (field == "namespace" and value is None):
            raise RequestError(
                f"{where}.{field}={show(value)} is not a string.", f"{where}.{field}"
            )


def _check_include(value: object) -> object:
    if isinstance(value, list):
        for entry in value:
            if entry not in _INCLUDES:
                raise RequestError(
                    f"include={show(entry)} is unknown; use {', '.join(_INCLUDES)}.", "include"
                )
    return value


def check_metadata(value: object) -> object:
    """Return metadata if they are within the limits of OpenAI's API.

    Raises:
        RequestError: they are not.
    """
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise RequestError(
            f"metadata has {len(value)} entries; at most {MAX_METADATA} are allowed.", "metadata"
        )
    return value


Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    BeforeValidator(check_metadata),
]


class ResponseFunction(Body):
    """Function of a namespace."""

    type: Literal["function"]
    """Kind of the tool: function."""
    name: str
    """Name of the function."""
    description: str | None = None
    """Purpose of the function."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Require a grammar that holds each call to the schema."""


class ResponseTool(Body):
    """Function that the model may call, or a namespace of functions."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"tools": ResponseFunction}

    type: Literal["function", "namespace"]
    """function, or namespace with `tools`."""
    name: str
    """Name of the function or namespace."""
    description: str | None = None
    """Purpose of the function or namespace."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments of a function."""
    strict: bool | None = None
    """Require a grammar that holds each call of the function to the schema."""
    tools: Annotated[list[ResponseFunction], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    """Functions of a namespace; the model knows them as namespace__name."""

    def written(self) -> dict[str, Any]:
        """Return the tool as a response has it."""
        if self.type == "function":
            return self.model_dump(exclude={"tools"})
        return self.model_dump(exclude={"parameters", "strict"})

    def functions(self) -> list[dict[str, Any]]:
        """Return its functions in the form of a chat."""
        if self.type == "function":
            return [self.model_dump(exclude={"type", "tools"}, exclude_unset=True)]
        found = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools or ()]
        for function in found:
            function["name"] = full_name(function["name"], self.name)
        if self.description:
            first = found[0].get("description")
            found[0]["description"] = " ".join(filter(None, [self.description, first]))
        return found


class TextFormat(Body):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    """text, json_object, or json_schema with `schema`."""
    name: str | None = None
    """Name of the schema."""
    description: str | None = None
    """Purpose of the schema."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """JSON schema of the text."""
    strict: bool | None = None
    """No effect: a grammar always holds the text to the schema."""


_TEXT_PARTS: Mapping[str, type[Body]] = {"format": TextFormat}


class TextConfig(Body):
    """Text of the answer."""

    inner = _TEXT_PARTS

    format: TextFormat | None = None
    """Format of the text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect."""


class ReasoningConfig(Body):
    """Reasoning of the model."""

    unsupported = known_fields.RESPONSES_REASONING

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable for the chat template; none: no reasoning, if the template supports that."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: reasoning items have the whole text."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of summary."""


class ConversationReference(Body):
    """Conversation of a response."""

    id: str
    """Id of the conversation."""


class ResponseStreamOptions(Body):
    """Options of a stream."""

    unsupported = known_fields.RESPONSES_STREAM_OPTIONS


class InputTokensBody(Body):
    """Body of POST /v1/responses/input_tokens."""

    unsupported = known_fields.RESPONSES
    instead = known_fields.RESPONSES_INSTEAD
    inner: ClassVar[Mapping[str, type[Body]]] = {
        "tools": ResponseTool,
        "text": TextConfig,
        "reasoning": ReasoningConfig,
    }

    model: str | None = None
    """Served model name; default: the first one."""
    input: Annotated[
        list[dict[str, Any]] | None,
        BeforeValidator(_check_input, json_schema_input_type=str | list[dict[str, Any]] | None),
    ] = None
    """Text of the user, or a list of items: messages, function_call, function_call_output,
    reasoning and item_reference."""
    instructions: str | None = None
    """System message before all items."""
    previous_response_id: str | None = None
    """Stored response whose input and output precede the input."""
    conversation: Annotated[
        ConversationReference | None,
        BeforeValidator(
            lambda value: {"id": value} if isinstance(value, str) else value,
            json_schema_input_type=str | ConversationReference | None,
        ),
    ] = None
    """Conversation whose items precede the input; it receives the input and the output."""
    tools: Annotated[
        list[ResponseTool] | None,
        Field(max_length=MAX_TOOLS, fail_fast=True),
        BeforeValidator(_check_tools),
    ] = None
    """Functions that the model may call."""
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | dict[str, Any] | None,
        BeforeValidator(_check_choice),
    ] = None
    """auto (default): the model may call tools; none: it calls none; required: it calls at least
    one; {"type": "function", "name"}: it calls this one; {"type": "allowed_tools", "mode",
    "tools"}: it calls only these tools, with mode auto or required."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in a response. Default true."""
    text: TextConfig | None = None
    """Format of the text."""
    reasoning: ReasoningConfig | None = None
    """Reasoning of the model."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Scope of cached prefixes: requests with another one share none; vLLM."""

    def check(self) -> None:
        """Check that the fields fit together.

        Raises:
            RequestError: a field is missing, or fields contradict each other.
        """
        if self.previous_response_id is not None and self.conversation is not None:
            raise RequestError(
                "previous_response_id and conversation both precede the input; give one of them.",
                "previous_response_id",
            )
        if self.input is None and self.previous_response_id is None and self.conversation is None:
            raise RequestError("input is missing; it is required.", "input", "missing_parameter")
        found = self.text and self.text.format
        if found and found.type == "json_schema" and found.schema_ is None:
            raise RequestError(
                "text.format.schema is missing; type json_schema needs it.", "text.format.schema"
            )

    def to_chat(self, items: Sequence[Item]) -> ChatBody:
        """Return the checked body of a chat completion.

        Args:
            items: all items, without references.

        Raises:
            RequestError: the fields do not fit together; the message has this body's names.
        """
        messages = to_messages(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        chat: dict[str, Any] = {"messages": messages, "model": self.model}
        tools = self._functions()
        self._check_named(tools)
        if tools:
            chat["tools"] = [{"type": "function", "function": function} for function in tools]
        chat["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if isinstance(choice, dict):
            if choice["type"] == "function":
                choice = {"type": "function", "function": {"name": _chosen(choice)}}
            else:  # the prompt has all tools, so that its cached prefix stays valid
                named = [
                    {"type": "function", "function": {"name": _chosen(tool)}}
                    for tool in choice["tools"]
                ]
                allowed = {"mode": choice["mode"], "tools": named}
                choice = {"type": "allowed_tools", "allowed_tools": allowed}
        if tools or choice not in ("auto", "none"):
            chat["tool_choice"] = choice
        if self.text is not None and (form := self.text.format) is not None:
            chat["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                schema = {"name": form.name or "schema", "schema": form.schema_}
                chat["response_format"]["json_schema"] = schema
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        try:
            return self.complete(chat)
        except RequestError as error:
            raise renamed(error) from None

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat, with the fields of subclasses."""
        return ChatBody.checked(chat | {"cache_salt": self.cache_salt})

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return names and namespaces of functions, by the names that the model knows."""
        return {
            full_name(function.name, tool.name): (function.name, tool.name)
            for tool in self.tools or ()
            if tool.type == "namespace"
            for function in tool.tools or ()
        }

    def _functions(self) -> list[dict[str, Any]]:
        """Return the functions of `tools` in the form of a chat.

        Raises:
            RequestError: the model could not tell a function of a namespace from another one.
        """
        functions = [function for tool in self.tools or () for function in tool.functions()]
        spaced, known = self.namespaces(), set[str]()
        for function in functions:
            name = function["name"]
            if name in known and name in spaced:
                raise RequestError(
                    f"tools has two functions that the model would know as {show(name)}; rename "
                    "one of them, or its namespace.",
                    "tools",
                )
            known.add(name)
        return functions

    def _check_named(self, functions: Sequence[Mapping[str, Any]]) -> None:
        """Raise RequestError if `tool_choice` names another function than those of `tools`."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return
        known = {function["name"] for function in functions}
        named = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
        for tool in named:
            if _chosen(tool) not in known:
                raise RequestError(
                    f"tool_choice names {show(tool['name'])}, which is not a function of tools.",
                    "tool_choice",
                )


def _chosen(tool: Mapping[str, Any]) -> str:
    """Return the name by which the model knows a chosen function."""
    return full_name(tool["name"], tool.get("namespace"))


class ResponseBody(InputTokensBody):
    """Body of POST /v1/responses."""

    inner: ClassVar[Mapping[str, type[Body]]] = {
        **InputTokensBody.inner,
        "stream_options": ResponseStreamOptions,
    }

    stream: bool | None = None
    """Stream the response as server-sent events."""
    stream_options: ResponseStreamOptions | None = None
    """Options of the stream."""
    background: bool | None = None
    """Return at once, and make the response without its client."""
    store: bool | None = None
    """Store the response for later requests. Default true."""
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    """Maximum tokens of the output, reasoning included; default: all that fit."""
    temperature: Float | None = None
    """Divisor of the logits; 0: greedy."""
    top_p: Float | None = None
    """Share of probability of the tokens to sample from."""
    include: Annotated[list[str] | None, BeforeValidator(_check_include)] = None
    """Additional data: message.output_text.logprobs. Other values of OpenAI's API have no effect,
    as responses here have no such items."""
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of most probable tokens in the logprobs; needs include."""
    metadata: Metadata | None = None
    """Notes of the client, at most 16."""
    max_tool_calls: Int | None = None
    """No effect: it limits tools of the server, and there are none."""
    user: str | None = None
    """End user; no effect."""
    client_metadata: dict[str, Any] | None = None
    """No effect: notes of OpenAI's agents."""
    safety_identifier: str | None = None
    """End user; no effect."""
    prompt_cache_key: str | None = None
    """No effect: prefixes are cached always."""
    prompt_cache_retention: str | None = None
    """No effect."""
    service_tier: str | None = None
    """No effect: all requests are served alike."""
    explain: bool | None = None
    """Explain the time of the request in its response, as explanation; see docs/explain.md."""

    @property
    def wants_logprobs(self) -> bool:
        """True if the response has logprobs."""
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Check that the fields fit together; see `InputTokensBody.check`."""
        super().check()
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(
                f'top_logprobs needs include=["{LOGPROBS}"].',
                "top_logprobs",
            )
        if self.background and self.store is False:
            raise RequestError(
                "background=true needs store=true, since its client asks for the response later.",
                "background",
            )

    def complete(self, chat: dict[str, Any]) -> ChatBody:
        """Return the checked body of a chat; see `InputTokensBody.complete`."""
        chat |= {
            "stream": bool(self.stream or self.background),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "explain": self.explain,
        }
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return super().complete(chat)


class ConversationBody(Body):
    """Body of POST /v1/conversations."""

    items: Annotated[
        list[dict[str, Any]] | None,
        BeforeValidator(
            lambda value: value and _check_items(value),
            json_schema_input_type=list[dict[str, Any]] | None,
        ),
    ] = None
    """First items."""
    metadata: Metadata | None = None
    """Notes of the client, at most 16."""


class ConversationUpdateBody(Body):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None
    """New notes of the client, in place of the earlier ones."""


class ConversationItemsBody(Body):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_check_items, json_schema_input_type=list[dict[str, Any]]),
    ]
    """Items to append."""


def renamed(error: RequestError) -> RequestError:
    """Return an error in a chat with the names of the fields that mean the same in this API."""
    for chat_name, name in _CHAT_NAMES.items():
        if error.param is not None:
            error.param = re.sub(rf"^{chat_name}(?![\w])", name, error.param)
        error.message = re.sub(rf"(?<![\w.]){chat_name}(?![\w])", name, error.message, count=1)
    return error
